"""Triton kernels, one file per kind of pass. A name means the same in all of them, and in kernels/cuda.

p_ is a pointer, d_ a tensor descriptor, i_ an index of the program, o_ offsets, m_ a mask, b_ a block of values.
Capitals are sizes and compile-time constants; booleans begin with IS_, HAS_ or a verb. Positions (z, y, x) lie in rows
of slices of samples.

    N, C, S, D, H, W                       samples, channels and positions of the value that is read, and its space
    C_IN, C_OUT, OD, OH, OW                a convolution's channels, and the space of what is written
    C_PACKED                               channels of a position of a packed operand: padded, or those of several taps
    GROUPS, C_PER_GROUP                    a norm's groups in a sample, and the channels of one
    L, ROWS, ROWS_PER_CHANNEL              layer_norm: elements of a row; rows in all, and of a sample's channel
    KD, KH, KW, TAPS, TAP_ROWS             a convolution's or window's taps along each axis, in all, without the last
    PD, PH, PW                             zeros in front of each axis of the input
    STRIDE_D, STRIDE_H, STRIDE_W           strides of a transposed convolution or of a pool's windows
    CROP_D, CROP_H, CROP_W                 a transposed convolution's padding, which crops its output
    KERNEL, STRIDE, CROP, PAD              of one axis: K, STRIDE_, CROP_ and P as above
    DIVISOR, UNROLLED                      an average's, where it is given, else 0; a window's rows of taps side by side
    REACH_D, REACH_H, REACH_W, NTH         upsampled positions that may read one, and which of them
    SIZE                                   positions along an axis before it is upsampled or pooled
    PADDED_KH, PADDED_KW                   KH and KW rounded up to multiples of the strides
    UNFOLDED_H, UNFOLDED_W, UNFOLDED_TAPS  taps side by side in a packed position (im2col): along y, x, and in all
    PACKED_TAPS                            positions of a packed weight: TAPS / UNFOLDED_TAPS
    ROW_PITCH, SLICE_PITCH                 positions from one row, and one slice, of a packed volume to the next
    SLICE_ROWS, SAMPLE_ROWS, PACKED_ROWS   rows of a packed slice, of a packed sample, and in all
    NEIGHBOURS, SPAN                       neighbouring outputs of a product's row, and the positions they read along x
    K, K_PER_TAP_ROW, K_STEPS              a product's depth, that of one (z, y) of the taps, and its steps of BLOCK_K
    M_PER_SAMPLE, PRODUCT_M, PRODUCT_N     a product's rows for each sample; its rows and columns in all
    PRODUCTS, PRODUCTS_PER_GROUP           products of a weight's gradient, and those with one tile of the gradient
    TAP_GROUPS, TAP_GROUPS_PER_SLICE, TAP_GROUPS_PER_ROW  groups of such products: in all, of one z, of one (z, y)
    FRONT_ROWS                             rows of zeros before a packed operand
    PLANES, SPLITS, STAGES                 16-bit planes of an operand; parts of split-K; stages of the pipeline
    CHUNKS, PARTS                          parts of a sample with moments or sums of their own; those to be combined
    NUM_SUMS, NUM_COLUMN_SUMS, NUM_FULL    results of GRADIENT_FN: to be summed, summed by column, stored in full
    START, SUM_STRIDE                      the first of such results; elements from one sum to the next
    TILES, TILES_PER_PROGRAM, ROWS_PER_PROGRAM  tiles of a sample; tiles and rows that one program walks through
    BLOCK_M, BLOCK_N, BLOCK_K              a product's tile: rows, columns, depth of a step
    BLOCK_C, BLOCK_S, BLOCK_W, BLOCK_H     a tile's channels, its positions, and those along x and y
    BLOCK_J, BLOCKS_C                      positions along x by NEIGHBOURS; tiles along the channels
    BLOCK_L, BLOCK_ROWS, BLOCK_PAD         a tile's elements of a row, and rows; PW rounded up
    BLOCK_PARTS, BLOCK_SAMPLES             PARTS, and samples, at a time
    ALIGN, ACC, POSITION_AXIS              a power of two in a row's length; the accumulator's dtype; positions' axis
    STORE, MOMENTS, OP                     words: what an epilogue stores, which moments it keeps; a reduction or pool
    STEPS_FN, NORM_STEPS_FN, ROW_STEPS_FN  a chain's steps as one function: without a norm, with one, by rows
    MOMENTS_FN, SUMS_FN, SCALE_FN          steps on moments; sums for a norm's gradient; the scale of a magnitude
    AFTER_FN, GRADIENT_FN, ROW_GRADIENT_FN  the steps after a pool; all gradients of a chain's steps, also by rows
    IS_CHANNELS_LAST, IS_CONTIGUOUS, IS_OUT_CONTIGUOUS  a value is [N, S, C]; it, or the result, is [N, C, S]
    HAS_SHORT_ROWS, IS_WHOLE_SAMPLE, HAS_ONE_CHANNEL  a tile has whole rows; a row is a sample; rows are of one channel
    HAS_GROUPS, IS_REDUCED                 rows are groups of a sample's features; a pass leaves one number of each
    IS_WEIGHT_CUT, BLOCKS_TOGETHER         the weight is cut into planes inside of the product; its tiles side by side
    IS_DENSE, IS_EVEN_C, IS_EVEN_ROWS      nothing to mask: between packed rows, past the channels, past the rows
    IS_OVER_SPACE, IS_OVER_ROWS, IS_OVER_BATCH, IS_SUM  what is reduced: space alone, rows, samples; a sum, no mean
    IS_SCALED, KEEPS_INF, FLAGS_INF, HAS_LARGEST  operands are scaled; infinities kept, flagged; magnitudes are found
    IS_FLIPPED, IS_TRANSPOSED, IS_AB_SWAPPED  taps run backwards; a tile is stored transposed; A and B are swapped
    HAS_NORM, HAS_GAMMA, HAS_BETA, HAS_BIAS, HAS_M2, HAS_PADDING, HAS_RUNNING_STATS  whether there are such
    HAS_BORDER, IS_PADDING_COUNTED, HAS_TAPS  windows leave the value; averages count that; a largest's place is kept
    HAS_REDUCED                            what a reduction gives is kept, before the steps after it
    IS_LINEAR, HAS_CENTRES                 upsampling: of two neighbours, else the nearest; positions lie at half a step
    USES_INT64, dtype                      offsets in a sample need 64 bits; of a result
    alpha, beta, bound, eps, exponent, high, input_scale, low, momentum, scale, slope, threshold  settings of a step
"""
