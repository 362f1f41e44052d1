"""Triton kernels, one file per kind of pass. A name means the same in all of them, and in kernels/cuda.

Prefixes: p_ is a pointer, d_ a tensor descriptor, i_ an index of the program, o_ a block of offsets, m_ a mask, b_ a
block of values. Capitals are sizes and compile-time constants; booleans begin with IS_, HAS_ or a verb. A position is
(z, y, x): a sample has slices along z, a slice has rows along y, a row has positions along x. "Product" stands for the
matrix product (GEMM) of a kernel.

    N, C, S, D, H, W                       samples, channels, positions of the value that is read; S = D·H·W
    C_IN, C_OUT, OD, OH, OW                a convolution's channels, and the spatial size of the output
    C_PACKED                               channels per position of a packed operand: padded, or those of several taps
    GROUPS, C_PER_GROUP                    a norm's groups per sample, and channels per group
    L, ROWS, ROWS_PER_CHANNEL              layer_norm: elements of a row; rows in all, and per channel of a sample
    KD, KH, KW, TAPS, TAP_ROWS             taps of a convolution or window: along z, y, x; KD·KH·KW; KD·KH
    PD, PH, PW                             padding in front of each axis of the input
    STRIDE_D, STRIDE_H, STRIDE_W           strides of a convolution, of a transposed one, or of a pool's windows
    DILATION_D, DILATION_H, DILATION_W     positions from one tap of a convolution to the next
    RESIDUES_H, RESIDUES_W, RESIDUE_PITCH  residues modulo the strides that are packed; positions of one in the volume
    CROP_D, CROP_H, CROP_W                 a transposed convolution's padding, which crops its output
    KERNEL, STRIDE, DILATION, CROP, PAD    of one axis: K, STRIDE_, DILATION_, CROP_ and P as above
    DIVISOR, UNROLLED                      avg_pool's divisor_override, or 0; rows of a window's taps that are unrolled
    REACH_D, REACH_H, REACH_W, NTH         upsampling: how many results may read one position; which of them
    SIZE                                   positions along an axis before it is upsampled or pooled
    PADDED_KH, PADDED_KW                   KH and KW rounded up to multiples of the strides
    UNFOLDED_H, UNFOLDED_W, UNFOLDED_TAPS  taps side by side in a packed position (im2col): along y, x, and in all
    PACKED_TAPS                            positions of a packed weight: TAPS / UNFOLDED_TAPS
    ROW_PITCH, SLICE_PITCH                 positions from one row, and one slice, of a packed volume to the next
    SLICE_ROWS, SAMPLE_ROWS, PACKED_ROWS   rows of a packed slice, of a packed sample, and in all
    NEIGHBOURS, SPAN                       neighbouring outputs in a row of the product; positions they read along x
    K, K_PER_TAP_ROW, K_STEPS              depth of a product; of the taps of one (z, y); steps of BLOCK_K in it
    M_PER_SAMPLE, PRODUCT_M, PRODUCT_N     rows of a product per sample; its rows and columns in all
    PRODUCTS, PRODUCTS_PER_GROUP           weight gradient: products in all; those that share a tile of the gradient
    TAP_GROUPS, TAP_GROUPS_PER_SLICE, TAP_GROUPS_PER_ROW  groups of such products: in all, per z, per (z, y)
    FRONT_ROWS                             rows of zeros before a packed operand
    PLANES, SPLITS, STAGES                 16-bit planes of an operand; parts of split-K; stages of the pipeline
    CHUNKS, PARTS                          parts of a sample with partial moments or sums; partial results to combine
    NUM_SUMS, NUM_COLUMN_SUMS, NUM_FULL    results of GRADIENT_FN that are summed, summed by column, stored in full
    START, SUM_STRIDE                      the first of such results; elements from one sum to the next
    TILES, TILES_PER_PROGRAM               tiles per sample; tiles over which one program loops
    ROWS_PER_PROGRAM, SLICES_PER_PROGRAM   rows, and slices, over which one program loops
    BLOCK_M, BLOCK_N, BLOCK_K              a product's tile: rows, columns, depth of one step
    BLOCK_C, BLOCK_S, BLOCK_W, BLOCK_H     a tile's channels, its positions, and those along x and y
    BLOCK_J, BLOCKS_C                      positions along x divided by NEIGHBOURS; tiles along the channels
    BLOCK_L, BLOCK_ROWS, BLOCK_PAD         a tile's elements per row, and its rows; PW rounded up
    BLOCK_PARTS, BLOCK_SAMPLES             partial results, and samples, that are loaded at a time
    BLOCK_D, BLOCK_P, BLOCK_KD             a tile's slices, and its positions in each; KD rounded up
    ALIGN, ACC, POSITION_AXIS              a power of two dividing the row length; accumulator dtype; axis of positions
    STORE, MOMENTS, OP                     words: what an epilogue stores, which moments it keeps; a reduction or pool
    STEPS_FN, NORM_STEPS_FN, ROW_STEPS_FN  a chain's steps as one function: without a norm, with one, by rows
    MOMENTS_FN, SUMS_FN, SCALE_FN          steps on moments; sums for a norm's gradient; the scale for a magnitude
    AFTER_FN, GRADIENT_FN, ROW_GRADIENT_FN  the steps after a pool; all gradients of a chain's steps, also by rows
    IS_CHANNELS_LAST, IS_CONTIGUOUS, IS_OUT_CONTIGUOUS  the value is [N, S, C]; the value, or the result, is [N, C, S]
    HAS_SHORT_ROWS, IS_WHOLE_SAMPLE, HAS_ONE_CHANNEL  a tile holds whole rows; a row is a sample; rows share a channel
    HAS_GROUPS, IS_REDUCED                 a row is one group of a sample's features; a pass leaves one number per row
    IS_WEIGHT_CUT, IS_WEIGHT_TURNED        the weight is split into planes in the kernel; it lies transposed
    BLOCKS_TOGETHER                        tiles of the weight that run together
    IS_DENSE, IS_EVEN_C, IS_EVEN_ROWS      nothing to mask: between packed rows, past the channels, past the rows
    IS_OVER_SPACE, IS_OVER_ROWS, IS_OVER_BATCH, IS_SUM  what is reduced: space alone, rows, samples; sum, not mean
    IS_SCALED, KEEPS_INF, FLAGS_INF, HAS_LARGEST  operands are scaled; infinities kept, flagged; find max |x|
    IS_FLIPPED, IS_TRANSPOSED, IS_AB_SWAPPED  taps in reverse order; a tile is stored transposed; A and B are swapped
    HAS_NORM, HAS_GAMMA, HAS_BETA, HAS_BIAS, HAS_M2, HAS_PADDING, HAS_RUNNING_STATS  whether there is one
    IS_CONV_TRANSPOSED, HAS_FACTORS, HAS_EXTREMES  of a transposed convolution; rows times numbers; keep min and max
    HAS_BORDER, IS_PADDING_COUNTED, HAS_TAPS  windows reach past the value; count_include_pad; keep the argmax
    HAS_REDUCED                            a reduction's result is kept, before the steps after it
    IS_LINEAR, HAS_CENTRES                 upsampling: linear, else nearest; not align_corners
    USES_INT64, dtype                      offsets in a sample need 64 bits; dtype of a result
    alpha, beta, bound, eps, exponent, high, input_scale, low, momentum, scale, slope, threshold  settings of a step
"""
