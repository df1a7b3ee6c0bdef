// Products with weights that are small integers, in groups of neighbours along the depth with a scale and perhaps an
// offset each: a weight is scale * value + offset.
//
// Panels hold unsigned bytes. With 8 bits a byte is the value + 128. With 4 bits it is 16 times the value, a half of a
// byte in its place, and scales are divided by 16: so without offsets, where 8 stands for zero, both kinds are bytes
// around 128. Scales and offsets are multiples of their column's unit, in the order of reading:
//
//     panel p, 8 bits:  [depth / 4][16][4]    4 bits:  [depth / 8][16][4], low halves word 2 i, high ones 2 i + 1
//     scales, offsets:  [columns / 16][depth / group_size][16]
//
// They are float16 or unsigned bytes: such a scale is the byte, and such an offset -240 times the byte. (With scales up
// to 255 units, weights on both sides of 0 need offsets from 0 down to -15 * 16 times as much.)
//
// Rows are integers of 8 bits in groups of 32, whatever the weights' groups are. A group with a number far larger than
// the others of its row loses more than all other groups. So there the rounding errors, the group's residual, are a
// group with a scale of its own, and are multiplied as well.
//
// The sum over 32 products of integers is exact; what groups add to an element of C is one chain of additions over the
// depth, as in product.h.
#pragma once

#include "product.h"

constexpr int GROUP = 32;
constexpr int GROUP_WORDS = GROUP / 4;
constexpr int32_t ZERO = 128;  // the byte that represents 0

// What sums of a group start from: the bits of 1.5 * 2^23. An integer up to 2^22 that is added to them is added to the
// float as well, so the sum's bits are a float already. With signed bytes, sums start from 0.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr float START_AS_FLOAT = 12582912.0f;
constexpr int32_t START = 0x4b400000;
INLINE f32_register scaled(i32_register dot, f32_register scale) {
    return fma16(bit_cast<f32_register>(dot), scale, scale * -START_AS_FLOAT);
}
#else
constexpr int32_t START = 0;
INLINE f32_register scaled(i32_register dot, f32_register scale) { return convert<f32_register>(dot) * scale; }
#endif

constexpr float OFFSET_OF_BYTE = -240;
constexpr float DWARFING = 4;      // times the root of the row's mean square
constexpr float NEARLY_0 = 1e-30;  // magnitudes up to this become 0, as their inverse could not be represented

// 32 elements of a row: scale * value each.
struct Group {
    int8_t values[GROUP];
    float scale;
    float sum;      // of the elements: the factor of offsets
    int32_t shift = START;  // START - ZERO times the sum of values: corrects products with unsigned bytes
    int32_t unused;
};

// Up to 32 rows that are multiplied at once, stored depth first, so that a product reads them in order.
struct GroupedRows {
    const Group* groups;          // [depth / GROUP][stride]
    const Group* residuals;       // likewise: rounding errors, where `has_residual`
    const uint8_t* has_residual;  // is 1; 32 bytes can be read from any place
    int64_t stride;

    // The rows that have a residual, as a bit mask.
    INLINE uint32_t residuals_of(int64_t place, int rows) const {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        const __m256i flags = load<__m256i>(has_residual + place);
        return uint32_t(_mm256_test_epi8_mask(flags, flags) & ((uint64_t(1) << rows) - 1));
#elif defined(__AVX2__)
        const __m256i highest_bits = _mm256_slli_epi16(load<__m256i>(has_residual + place), 7);
        return uint32_t(_mm256_movemask_epi8(highest_bits)) & uint32_t((uint64_t(1) << rows) - 1);
#else
        uint32_t bits = 0;
        for (int r = 0; r < rows; r++) bits |= uint32_t(has_residual[place + r]) << r;
        return bits;
#endif
    }
};

// Quantizes symmetrically: the largest magnitude, which is returned, becomes 127. The scale is NaN if an element is not
// finite. Leaves the rounding errors in `first` and `second`.
INLINE float quantize(f32x16& first, f32x16& second, Group& to) {
    // As integers, NaN is above all numbers.
    const i32x16 low_size = bit_cast<i32x16>(abs16(first)), high_size = bit_cast<i32x16>(abs16(second));
    const float largest = bit_cast<float>(max_of16(select(low_size > high_size, low_size, high_size)));
    const float inverse = largest > NEARLY_0 ? 127 / largest : 0;
    constexpr float ROUND = 12582912.0f;
    const f32x16 low = (first * inverse + ROUND) - ROUND, high = (second * inverse + ROUND) - ROUND;
    const i32x16 low_value = convert<i32x16>(low), high_value = convert<i32x16>(high);
    const int32_t sum = sum16(low_value + high_value);
    store16(to.values, low_value);
    store16(to.values + LANES, high_value);
    to.scale = largest / 127 + (largest - largest);
    to.sum = to.scale * float(sum);
    to.shift = START - ZERO * sum;
    first -= to.scale * low;
    second -= to.scale * high;
    return largest;
}

// ---- a group's products with the columns of some panels, by level ----

#if defined(__aarch64__) || (defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__))

// Signed bytes, into which 4 bits fit if they are multiplied as they are.
constexpr int HALVES_UP = 0;  // how far 4 bits are shifted up: not at all
constexpr int PANELS_AT_ONCE = 1;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int GROUPS_AT_ONCE = 2;
#else
constexpr int GROUPS_AT_ONCE = 1;
#endif

#if defined(__AVX2__)

// The instruction multiplies unsigned by signed bytes and adds pairs in 16 bits, which hold the sum only if one factor
// is small. So for 8 bits the magnitudes of weights are multiplied, by values that take the weights' signs.
#if defined(__AVX512BW__)
typedef __m512i Bytes;
INLINE Bytes broadcast(int32_t word) { return _mm512_set1_epi32(word); }
INLINE Bytes pairs_of(Bytes weights, Bytes values) { return _mm512_maddubs_epi16(weights, values); }
INLINE Bytes sums_of_pairs(Bytes words, int16_t scale) { return _mm512_madd_epi16(words, _mm512_set1_epi16(scale)); }
INLINE Bytes magnitudes(Bytes weights) { return _mm512_abs_epi8(weights); }
INLINE Bytes with_sign_of(Bytes values, Bytes weights) {
    return _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(weights), Bytes{}, values);
}
#else
typedef __m256i Bytes;
INLINE Bytes broadcast(int32_t word) { return _mm256_set1_epi32(word); }
INLINE Bytes pairs_of(Bytes weights, Bytes values) { return _mm256_maddubs_epi16(weights, values); }
INLINE Bytes sums_of_pairs(Bytes words, int16_t scale) { return _mm256_madd_epi16(words, _mm256_set1_epi16(scale)); }
INLINE Bytes magnitudes(Bytes weights) { return _mm256_abs_epi8(weights); }
INLINE Bytes with_sign_of(Bytes values, Bytes weights) { return _mm256_sign_epi8(values, weights); }
#endif
typedef int16_t Words16 __attribute__((vector_size(sizeof(Bytes))));

template <int BITS>
INLINE void multiply_register(const Group* group, const u32_register (&b)[GROUP_WORDS], i32_register (&dots)[1]) {
    i32_register sum{};
    Words16 pairs{};
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++) {
        const Bytes values = broadcast(load<int32_t>(group->values + 4 * w)), weights = bit_cast<Bytes>(b[w]);
        if (BITS == 4)
            pairs += bit_cast<Words16>(pairs_of(weights, values));
        else
            sum += bit_cast<i32_register>(
                sums_of_pairs(pairs_of(magnitudes(weights), with_sign_of(values, weights)), 1));
    }
    dots[0] = BITS == 4 ? bit_cast<i32_register>(sums_of_pairs(bit_cast<Bytes>(pairs), 16)) : sum;
}

#elif defined(__ARM_FEATURE_MATMUL_INT8)

// An instruction multiplies eight neighbours of two rows with those of two columns. A single row is used twice.
template <int BITS, int ROWS>
INLINE void multiply_register(const Group* groups, const u32_register (&b)[GROUP_WORDS], i32_register (&dots)[ROWS]) {
    int32x4_t low = vdupq_n_s32(0), high = low;  // first two columns: one row's sums, the other's; then the next two
#pragma GCC unroll 4
    for (int w = 0; w < GROUP_WORDS; w += 2) {
        const int8x16_t values = vcombine_s8(vld1_s8(groups[0].values + 4 * w), vld1_s8(groups[ROWS - 1].values + 4 * w));
        low = vmmlaq_s32(low, values, bit_cast<int8x16_t>(b[w]));
        high = vmmlaq_s32(high, values, bit_cast<int8x16_t>(b[w + 1]));
    }
    const int32x4_t rows[] = {vcombine_s32(vget_low_s32(low), vget_low_s32(high)),
                              vcombine_s32(vget_high_s32(low), vget_high_s32(high))};
    for (int r = 0; r < ROWS; r++) dots[r] = bit_cast<i32_register>(BITS == 4 ? vshlq_n_s32(rows[r], 4) : rows[r]);
}

// Two words of four columns -> eight neighbours of the first two columns, and of the next two.
INLINE void interleave(u32_register& first, u32_register& second) {
    const uint32x4_t low = bit_cast<uint32x4_t>(first), high = bit_cast<uint32x4_t>(second);
    first = bit_cast<u32_register>(vzip1q_u32(low, high));
    second = bit_cast<u32_register>(vzip2q_u32(low, high));
}

#else

template <int BITS>
INLINE void multiply_register(const Group* group, const u32_register (&b)[GROUP_WORDS], i32_register (&dots)[1]) {
    int32x4_t sum = vdupq_n_s32(0);
#if !defined(__ARM_FEATURE_DOTPROD)
    int16x8_t low = vdupq_n_s16(0), high = low;  // 16 bits hold two products of 8 bits, or 16 of 4 bits
#endif
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++) {
        const int8x16_t weights = bit_cast<int8x16_t>(b[w]);
        const int8x16_t values = bit_cast<int8x16_t>(vdupq_n_s32(load<int32_t>(group->values + 4 * w)));
#if defined(__ARM_FEATURE_DOTPROD)
        sum = vdotq_s32(sum, weights, values);
#else
        if (BITS == 4) {
            low = vmlal_s8(low, vget_low_s8(weights), vget_low_s8(values));
            high = vmlal_s8(high, vget_high_s8(weights), vget_high_s8(values));
        } else {
            low = vmull_s8(vget_low_s8(weights), vget_low_s8(values));
            high = vmull_s8(vget_high_s8(weights), vget_high_s8(values));
            sum = vpadalq_s16(sum, vpaddq_s16(low, high));
        }
#endif
    }
#if !defined(__ARM_FEATURE_DOTPROD)
    if (BITS == 4) sum = vpaddlq_s16(vpaddq_s16(low, high));
#endif
    dots[0] = bit_cast<i32_register>(BITS == 4 ? vshlq_n_s32(sum, 4) : sum);
}

#endif

template <int BITS, int ROWS>
INLINE void multiply_group(const Group* groups, const u32_register (&b)[1][GROUP_WORDS], bool has_shift,
                           i32_register (&dots)[ROWS][1]) {
    i32_register sums[ROWS];
    multiply_register<BITS>(groups, b[0], sums);
    for (int r = 0; r < ROWS; r++)
        dots[r][0] = BITS == 4 && has_shift ? sums[r] + (groups[r].shift - i32_register{}) : sums[r];
}

// Makes unsigned bytes signed.
INLINE u32x16 as_factor(u32x16 bytes) { return bytes ^ 0x80808080u; }

#else

constexpr int HALVES_UP = 4;
#if defined(__AVX512VNNI__)
constexpr int PANELS_AT_ONCE = 2, GROUPS_AT_ONCE = 4;
#else
constexpr int PANELS_AT_ONCE = 1, GROUPS_AT_ONCE = 1;
#endif

INLINE void multiply_add(i32_register& c, const int8_t* a, u32_register b) {
#if defined(__AVX512VNNI__)
    const __m512i word = _mm512_set1_epi32(load<int32_t>(a));
    c = bit_cast<i32_register>(_mm512_dpbusd_epi32(bit_cast<__m512i>(c), bit_cast<__m512i>(b), word));
#elif defined(__AVXVNNI__)
    const __m256i word = _mm256_set1_epi32(load<int32_t>(a));
    c = bit_cast<i32_register>(_mm256_dpbusd_avx_epi32(bit_cast<__m256i>(c), bit_cast<__m256i>(b), word));
#else
    for (int i = 0; i < 4; i++) c += bit_cast<i32_register>((b >> (8 * i)) & 0xff) * int32_t(a[i]);
#endif
}

template <int BITS, int ROWS, int PANELS>
INLINE void multiply_group(const Group* groups, const u32_register (&b)[PANELS][GROUP_WORDS], bool has_shift,
                           i32_register (&dots)[ROWS][PANELS]) {
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) dots[r][p] = (has_shift ? groups[r].shift : START) - i32_register{};
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) multiply_add(dots[r][p], groups[r].values + 4 * w, b[p][w]);
}

INLINE u32x16 as_factor(u32x16 bytes) { return bytes; }

#endif

// `ahead`: the distance, in scales, to the same place in the next panels, which is prefetched.
template <class T> INLINE f32x16 load_ahead(const void* from, int64_t place, int64_t ahead) {
    const T* scales = static_cast<const T*>(from) + place;
    __builtin_prefetch(scales + ahead, 0, 2);
    return load16(scales);
}

INLINE f32x16 load_scales(const Matrix& matrix, int64_t place, int64_t ahead = 0) {
    return matrix.scale_bits == 16 ? load_ahead<half>(matrix.scales, place, ahead)
                                   : load_ahead<uint8_t>(matrix.scales, place, ahead);
}

INLINE f32x16 load_offsets(const Matrix& matrix, int64_t place, int64_t ahead = 0) {
    return matrix.scale_bits == 16 ? load_ahead<half>(matrix.offsets, place, ahead)
                                   : load_ahead<uint8_t>(matrix.offsets, place, ahead) * OFFSET_OF_BYTE;
}

// `ahead`: the distance to the same place in the next panels, which is prefetched into the second-level cache.
template <int BITS> INLINE void load_words(const char* from, int64_t ahead, u32x16 (&words)[GROUP_WORDS]) {
    constexpr int STEP = 8 / BITS;
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w += STEP, from += 64) {
        const u32x16 bytes = load<u32x16>(from);
        __builtin_prefetch(from + ahead, 0, 2);
        if (BITS == 8) {
            words[w] = as_factor(bytes);
        } else {
            constexpr uint32_t MASK = 0x0f0f0f0fu << HALVES_UP;
            words[w] = (bytes << HALVES_UP) & MASK;
            words[w + STEP - 1] = (bytes >> (4 - HALVES_UP)) & MASK;
        }
    }
}

// The words of the columns from `lane` on, as they are multiplied.
INLINE void take_columns(const u32x16 (&all)[GROUP_WORDS], int lane, u32_register (&words)[GROUP_WORDS]) {
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++) words[w] = register_of<u32_register>(all[w], lane);
#if defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC unroll 4
    for (int w = 0; w < GROUP_WORDS; w += 2) interleave(words[w], words[w + 1]);
#endif
}

// Adds the product of a row's group with a register of columns to elements of C.
template <bool HAS_OFFSETS>
INLINE void add_scaled(const Group& group, i32_register dot, f32_register scale, f32_register offset, float* to) {
    f32_register sum = fma16(group.scale - f32_register{}, scaled(dot, scale), load<f32_register>(to));
    if (HAS_OFFSETS) sum = fma16(group.sum - f32_register{}, offset, sum);
    store_raw(to, sum);
}

template <int BITS, bool HAS_OFFSETS> constexpr bool IS_AROUND_ZERO = BITS == 8 || !HAS_OFFSETS;

// Adds the products of some rows' group with `words` to elements of C.
template <int BITS, bool HAS_OFFSETS, int ROWS, int PANELS>
INLINE void add_group(const Group* groups, const u32_register (&words)[PANELS][GROUP_WORDS],
                      const f32_register (&scales)[PANELS], const f32_register (&offsets)[PANELS], float* c,
                      int64_t ldc) {
    i32_register dots[ROWS][PANELS];
    multiply_group<BITS>(groups, words, IS_AROUND_ZERO<BITS, HAS_OFFSETS>, dots);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
            add_scaled<HAS_OFFSETS>(groups[r], dots[r][p], scales[p], offsets[p], c + r * ldc + p * LANES);
}

#if defined(__AMX_INT8__)

// With fewer rows, storing and reloading tiles takes as long as they save. (Estimated in cycles.)
constexpr int FEWEST_TILED_ROWS = 8;

// `add_group` for up to 32 rows: tiles of 16 rows of a group, whose 8 words match the lines of a panel's. The integers
// are the same, and so the result is the same, bit for bit.
template <int BITS, bool HAS_OFFSETS, int PANELS>
INLINE void add_tiled(const Group* groups, int rows, const u32_register (&words)[PANELS][GROUP_WORDS],
                      const f32_register (&scales)[PANELS], const f32_register (&offsets)[PANELS], float* c,
                      int64_t ldc) {
    constexpr int64_t STRIDE = PANELS * LANES * sizeof(int32_t);
    alignas(64) int32_t dots[32][PANELS * LANES];
    u32_register lines[PANELS][GROUP_WORDS];  // a copy, so that fewer rows can keep their words in registers
    for (int p = 0; p < PANELS; p++)
        for (int w = 0; w < GROUP_WORDS; w++) lines[p][w] = words[p][w];
    const bool has_second = rows > 16;
    finish_stores();
    _tile_loadd(6, lines[0], 64);
    if (PANELS > 1) _tile_loadd(7, lines[PANELS - 1], 64);
    _tile_loadd(4, groups->values, sizeof(Group));
    _tile_zero(0);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, dots[0], STRIDE);
    if (PANELS > 1) {
        _tile_zero(1);
        _tile_dpbsud(1, 4, 7);
        _tile_stored(1, dots[0] + LANES, STRIDE);
    }
    if (has_second) {
        _tile_loadd(5, groups[16].values, sizeof(Group));
        _tile_zero(2);
        _tile_dpbsud(2, 5, 6);
        _tile_stored(2, dots[16], STRIDE);
        if (PANELS > 1) {
            _tile_zero(3);
            _tile_dpbsud(3, 5, 7);
            _tile_stored(3, dots[16] + LANES, STRIDE);
        }
    }
    finish_stores();
    for (int r = 0; r < rows; r++) {
        const i32x16 shift = (IS_AROUND_ZERO<BITS, HAS_OFFSETS> ? groups[r].shift : START) - i32x16{};
        for (int p = 0; p < PANELS; p++)
            add_scaled<HAS_OFFSETS>(groups[r], load<i32x16>(dots[r] + p * LANES) + shift, scales[p], offsets[p],
                                    c + r * ldc + p * LANES);
    }
}

#endif

// Adds the products of all rows' groups at `place`, and of their residuals, with `words` to C.
template <int BITS, bool HAS_OFFSETS, int PANELS>
INLINE void add_rows(const GroupedRows& a, int64_t place, int rows, uint32_t residuals,
                     const u32_register (&words)[PANELS][GROUP_WORDS], const f32_register (&scales)[PANELS],
                     const f32_register (&offsets)[PANELS], float* c, int64_t ldc) {
    const Group* groups = a.groups + place;
    int r = 0;
#if defined(__AMX_INT8__)
    if (rows >= FEWEST_TILED_ROWS) {
        add_tiled<BITS, HAS_OFFSETS>(groups, rows, words, scales, offsets, c, ldc);
        r = rows;
    }
#endif
    for (; r + GROUPS_AT_ONCE <= rows; r += GROUPS_AT_ONCE)
        add_group<BITS, HAS_OFFSETS, GROUPS_AT_ONCE>(groups + r, words, scales, offsets, c + r * ldc, ldc);
    for (; r < rows; r++)
        add_group<BITS, HAS_OFFSETS, 1>(groups + r, words, scales, offsets, c + r * ldc, ldc);
    for (; residuals; residuals &= residuals - 1) {
        const int row = __builtin_ctz(residuals);
        add_group<BITS, HAS_OFFSETS, 1>(a.residuals + place + row, words, scales, offsets, c + row * ldc, ldc);
    }
}

// C [rows, 16 PANELS] (row stride ldc) = A B, from a panel on.
template <int BITS, bool HAS_OFFSETS, int PANELS>
static void multiply_groups(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, float* c,
                            int64_t ldc) {
    constexpr int64_t GROUP_BYTES = GROUP * LANES * BITS / 8;
    const int64_t panel_bytes = matrix.depth / GROUP * GROUP_BYTES;
    const int64_t panel_scales = matrix.depth / matrix.group_size * LANES;
    const char* b = static_cast<const char*>(matrix.panels) + panel * panel_bytes;
    int64_t scale = panel * panel_scales, place = 0;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PANELS; p++) store16(c + r * ldc + p * LANES, f32x16{});
#if defined(__AMX_INT8__)
    if (rows >= FEWEST_TILED_ROWS) shape_tiles(rows > 16 ? 16 : rows, rows > 16 ? rows - 16 : 16, GROUP);
#endif
    for (int64_t start = 0; start < matrix.depth; start += matrix.group_size, scale += LANES) {
        f32x16 all_scales[PANELS], all_offsets[PANELS] = {};
        for (int p = 0; p < PANELS; p++) {
            all_scales[p] = load_scales(matrix, scale + p * panel_scales, PANELS * panel_scales);
            if (HAS_OFFSETS) all_offsets[p] = load_offsets(matrix, scale + p * panel_scales, PANELS * panel_scales);
        }
        for (int64_t k = 0; k < matrix.group_size; k += GROUP, b += GROUP_BYTES, place += a.stride) {
            const uint32_t residuals = a.residuals_of(place, rows);
            u32x16 all_words[PANELS][GROUP_WORDS];
            for (int p = 0; p < PANELS; p++)
                load_words<BITS>(b + p * panel_bytes, PANELS * panel_bytes, all_words[p]);
            // One register of columns at a time: then the group's words stay in registers from row to row.
#pragma GCC unroll 4
            for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
                u32_register words[PANELS][GROUP_WORDS];
                f32_register scales[PANELS], offsets[PANELS];
                for (int p = 0; p < PANELS; p++) {
                    take_columns(all_words[p], lane, words[p]);
                    scales[p] = register_of<f32_register>(all_scales[p], lane);
                    offsets[p] = register_of<f32_register>(all_offsets[p], lane);
                }
                add_rows<BITS, HAS_OFFSETS>(a, place, rows, residuals, words, scales, offsets, c + lane, ldc);
            }
        }
    }
}

template <int BITS, bool HAS_OFFSETS>
static void multiply_format(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, int panels, float* c,
                            int64_t ldc) {
    int p = 0;
    for (; p + PANELS_AT_ONCE <= panels; p += PANELS_AT_ONCE)
        multiply_groups<BITS, HAS_OFFSETS, PANELS_AT_ONCE>(a, rows, matrix, panel + p, c + p * LANES, ldc);
    if (p < panels) multiply_groups<BITS, HAS_OFFSETS, 1>(a, rows, matrix, panel + p, c + p * LANES, ldc);
}

// Multiplies by `panels` panels, and then by the units.
static void multiply(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, int panels, float* c,
                     int64_t ldc) {
    const auto format = matrix.num_bits == 8 ? (matrix.offsets ? multiply_format<8, true> : multiply_format<8, false>)
                                             : (matrix.offsets ? multiply_format<4, true> : multiply_format<4, false>);
    format(a, rows, matrix, panel, panels, c, ldc);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < panels * LANES; k += LANES)
            store16(c + r * ldc + k, load16(c + r * ldc + k) * load16(matrix.units + panel * LANES + k));
}

// Reads `count` weights of a column.
inline void read_column(const Matrix& matrix, int64_t column, int64_t count, float* to, const Group*) {
    const int64_t lane = column % LANES, panel = column / LANES, num_scales = matrix.depth / matrix.group_size;
    const int64_t words_together = 8 / matrix.num_bits;
    const int32_t zero = matrix.num_bits == 8 || !matrix.offsets ? ZERO : 0;
    const uint8_t* from = static_cast<const uint8_t*>(matrix.panels) + panel * matrix.depth * LANES / words_together;
    const float unit = matrix.units[column];
    float scales[LANES], offsets[LANES] = {};
    for (int64_t k = 0; k < count; k++) {
        if (k % matrix.group_size == 0) {
            const int64_t place = (panel * num_scales + k / matrix.group_size) * LANES;
            store16(scales, load_scales(matrix, place) * unit);
            if (matrix.offsets) store16(offsets, load_offsets(matrix, place) * unit);
        }
        const int64_t word = k / 4;
        int32_t byte = from[(word / words_together * LANES + lane) * 4 + k % 4];
        if (words_together == 2) byte = (word % 2 ? byte : byte << 4) & 0xf0;
        to[k] = scales[lane] * float(byte - zero) + offsets[lane];
    }
}
