// The innermost step of a product: one vector of each panel, times the elements of some rows.
#pragma once

#include "../vector/arithmetic.h"

// The factors in a vector of `Pack` neighbours of each column, part by part.
template <int PART> INLINE f32x16 part_of(f32x16 words) { return words; }
template <int PART> INLINE f32x16 part_of(u32x16 words) {  // two bfloat16
    return bit_cast<f32x16>(PART ? words & 0xffff0000u : words << 16);
}

template <class T> struct Factor { typedef u32x16 type; };
template <> struct Factor<float> { typedef f32x16 type; };

// The elements of A at hand, in ROWS rows: four rows share a pointer and are multiples of one distance apart. With an
// address each, twelve rows would have more of them than there are registers.
template <class A, int ROWS> struct RowPointers {
    static constexpr int AT_ONCE = 4;
    const A* first[(ROWS + AT_ONCE - 1) / AT_ONCE];
    int64_t once, thrice;

    RowPointers(const A* a, int64_t lda) : once(opaque(lda)), thrice(opaque(3 * lda)) {
        for (int r = 0; r < ROWS; r += AT_ONCE) first[r / AT_ONCE] = opaque(a + r * lda);
    }

    INLINE const A* at(int row) const {
        const int64_t distances[AT_ONCE] = {0, once, 2 * once, thrice};
        return first[row / AT_ONCE] + distances[row % AT_ONCE];
    }

    INLINE void advance(int64_t elements) {
        for (const A*& each : first) each += elements;
    }

  private:
    // Hides where a value comes from: the compiler would compute every row's address of its own after all.
    template <class V> static INLINE V opaque(V value) {
        asm("" : "+r"(value));
        return value;
    }
};

// Adds the products with elements of A.
template <int PART, int PARTS, int ROWS, int PANELS, class Words>
INLINE void add_products(f32x16 (&sum)[ROWS][PANELS], const RowPointers<float, ROWS>& a,
                         const Words (&words)[PANELS]) {
    f32x16 factors[PANELS];
    for (int p = 0; p < PANELS; p++) factors[p] = part_of<PART>(words[p]);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const f32x16 element = splat(a.at(r)[PART]);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sum[r][p] = fma16(element, factors[p], sum[r][p]);
    }
    if constexpr (PART + 1 < PARTS) add_products<PART + 1, PARTS>(sum, a, words);
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define CHAIRLIFT_MULTIPLIES_BF16

// Adds the products of pairs.
INLINE f32_register add_pair(f32_register sum, int32_t pair, u32_register words) {
#if defined(__AVX512BF16__)
    const __m512i all = _mm512_set1_epi32(pair);
    return bit_cast<f32_register>(
        _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(all), bit_cast<__m512bh>(words)));
#else
    const bfloat16x8_t all = bit_cast<bfloat16x8_t>(vdupq_n_s32(pair));
    return bit_cast<f32_register>(vbfdotq_f32(bit_cast<float32x4_t>(sum), all, bit_cast<bfloat16x8_t>(words)));
#endif
}
template <class H, class Words> INLINE Pair<H> add_pair(Pair<H> sum, int32_t pair, Words words) {
    return {add_pair(sum.lo, pair, words.lo), add_pair(sum.hi, pair, words.hi)};
}

template <int PART, int PARTS, int ROWS, int PANELS>
INLINE void add_products(f32x16 (&sum)[ROWS][PANELS], const RowPointers<bf16, ROWS>& a,
                         const u32x16 (&words)[PANELS]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const int32_t pair = load<int32_t>(a.at(r));
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sum[r][p] = add_pair(sum[r][p], pair, words[p]);
    }
}
#endif

// What numbers are multiplied as: bfloat16 widened, unless the processor multiplies it.
template <class T> struct Multiplied { typedef T type; };
#if !defined(CHAIRLIFT_MULTIPLIES_BF16)
template <> struct Multiplied<bf16> { typedef float type; };
#endif

// The first `count` numbers, a multiple of 16, as they are multiplied: in `to` if they are not so already.
INLINE const float* multiplied(const float* numbers, int64_t, float*) { return numbers; }
#if defined(CHAIRLIFT_MULTIPLIES_BF16)
INLINE const bf16* multiplied(const bf16* numbers, int64_t, bf16*) { return numbers; }
#else
INLINE const float* multiplied(const bf16* numbers, int64_t count, float* to) {
    for (int64_t k = 0; k < count; k += LANES) store16(to + k, load16(numbers + k));
    return to;
}
#endif
