// How a tile of the input lies in shared memory, and what is multiplied with it. Needs operands.cuh.
//
// A slot of 4 numbers serves the XS taps next to one another in x, so the taps of the kernel are CHUNKS slots. One
// product takes 4 of them; STEPS products, each for NFRAG fragments of 8 output channels, make 16 outputs.

constexpr int THREADS = WARPS * 32;
constexpr int CHANNELS = NFRAG * 8;  // of this block, padded
constexpr int XS = 4 / CIN;
constexpr int CW = (KW + XS - 1) / XS;  // chunks of one (kd, kh)
constexpr int CHUNKS = KD * KH * CW;
constexpr int STEPS = (CHUNKS + 3) / 4;
constexpr int IN_H = TH + KH - 1;
constexpr int COLUMNS = 32 + (CW - 1) * XS;  // slots of a row that are read
// The 4 chunks of a product may lie in two neighbouring rows. Reads are free of bank conflicts where those are half
// of the banks apart, also from the last row of one kd to the first of the next: HALF slots are 64 bytes.
constexpr int HALF = 64 / sizeof(slot_t);
constexpr int PITCH = (COLUMNS + HALF - 1) / (2 * HALF) * (2 * HALF) + HALF;
constexpr int PLANE = IN_H * PITCH + (TH % 2 == 0 ? HALF : 0);
constexpr int FRAGMENTS = STEPS * NFRAG * 32;
constexpr int BATCH = 4;  // positions whose loads are in flight together

static_assert(1 <= CIN && CIN <= 4 && KW <= 4 && TH % R == 0, "unsupported settings");
