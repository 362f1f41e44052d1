// The layout of an input tile in shared memory, and the shape of the products. Needs operands.cuh.
//
// A slot of 4 numbers serves TAPS_PER_SLOT taps that are neighbours in x, so the convolution's kernel is TAP_CHUNKS
// slots. One tensor-core product takes 4 slots. K_STEPS products, each for NFRAG fragments of 8 channels, give 16
// outputs.

constexpr int THREADS = WARPS * 32, LANES = WARPS * 8;  // lanes that hold moments of the same channels
constexpr int BLOCK_C = NFRAG * 8;  // output channels of this block, padded
constexpr int TAPS = KD * KH * KW, TILES = TILES_D * TILES_H * TILES_W;
constexpr int OD = D + 2 * PD - KD + 1, OH = H + 2 * PH - KH + 1, OW = W + 2 * PW - KW + 1;
constexpr int TAPS_PER_SLOT = 4 / C_IN;
constexpr int TAP_CHUNKS_W = (KW + TAPS_PER_SLOT - 1) / TAPS_PER_SLOT;  // chunks of one (kd, kh)
constexpr int TAP_CHUNKS = KD * KH * TAP_CHUNKS_W, K_STEPS = (TAP_CHUNKS + 3) / 4;
constexpr int FRAGMENT_SLOTS = K_STEPS * NFRAG * 32;
constexpr int IN_H = BLOCK_H + KH - 1, IN_W = 32 + (TAP_CHUNKS_W - 1) * TAPS_PER_SLOT;  // rows, slots of a row
// The 4 chunks of a product may lie in two neighbouring rows. Reads have no bank conflicts if these rows are half of
// the banks apart, also from the last row of one kd to the first of the next. HALF_BANKS slots are 64 bytes.
constexpr int HALF_BANKS = 64 / sizeof(slot_t);
constexpr int ROW_PITCH = (IN_W + HALF_BANKS - 1) / (2 * HALF_BANKS) * (2 * HALF_BANKS) + HALF_BANKS;
constexpr int SLICE_PITCH = IN_H * ROW_PITCH + (BLOCK_H % 2 == 0 ? HALF_BANKS : 0);

static_assert(1 <= C_IN && C_IN <= 4 && KW <= 4 && BLOCK_H % ROWS_PER_WARP == 0, "unsupported settings");
static_assert(BLOCK_C <= THREADS && K_STEPS * 4 <= THREADS, "too few warps");
