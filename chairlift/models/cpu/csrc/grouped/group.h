// Groups of a row: 32 neighbours along the depth as integers of 8 bits with a scale, whatever the weights' groups are.
//
// Weights may have two scales for a group. Then the products of each half with them are scaled apart.
//
// A group with a number far larger than the others of its row loses more than all other groups. So there the rounding
// errors, the group's residual, are a group with a scale of its own, and are multiplied as well.
#pragma once

#include "../vector/arithmetic.h"

constexpr int GROUP = 32;
constexpr int GROUP_WORDS = GROUP / 4;
constexpr int32_t ZERO = 128;     // the byte of a weight that represents 0
constexpr int32_t HALF_ZERO = 32;  // likewise, of weights with a scale for each half of a group

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

constexpr float DWARFING = 4;      // times the root of the row's mean square
constexpr float NEARLY_0 = 1e-30;  // magnitudes up to this become 0, as their inverse could not be represented

// 32 elements of a row: scale * value each.
struct Group {
    int8_t values[GROUP];
    float scale;
    float sum;              // of the elements: the factor of offsets
    int32_t shift = START;  // START - ZERO times the sum of values: corrects products with unsigned bytes
    int32_t half_shifts[2] = {START, START};  // likewise START - HALF_ZERO times the sum of a half

    // What products with weights that have `SCALES` scales for a group start from, of the part that one scale is for.
    template <int SCALES> INLINE int32_t shift_of(int part) const { return SCALES == 1 ? shift : half_shifts[part]; }

    // The sum of the elements of that part.
    template <int SCALES> INLINE float sum_of(int part) const {
        return SCALES == 1 ? sum : scale * float((START - half_shifts[part]) / HALF_ZERO);
    }
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
    const int32_t is_finite = largest - largest == 0 ? -1 : 0;  // no integer represents the others, so they become 0
    const i32x16 low_value = convert<i32x16>(low) & is_finite, high_value = convert<i32x16>(high) & is_finite;
    const int32_t low_sum = sum16(low_value), high_sum = sum16(high_value), sum = low_sum + high_sum;
    store16(to.values, low_value);
    store16(to.values + LANES, high_value);
    to.scale = largest / 127 + (largest - largest);
    to.sum = to.scale * float(sum);
    to.shift = START - ZERO * sum;
    to.half_shifts[0] = START - HALF_ZERO * low_sum;
    to.half_shifts[1] = START - HALF_ZERO * high_sum;
    first -= to.scale * low;
    second -= to.scale * high;
    return largest;
}
