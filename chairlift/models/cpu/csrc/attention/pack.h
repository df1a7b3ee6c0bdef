// Keys, values and queries as panels of a product (see product/panel.h).
#pragma once

#include "../product/product.h"

// Tokens whose keys and values are read at a time: few enough for the first-level cache.
constexpr int KEYS_AT_ONCE = 32;

// The first `WORDS` words of at most 16 rows, `stride` elements apart -> as many lines of a panel, the rest zeros.
template <int WORDS, class T> INLINE void pack_lines(const T* rows, int64_t stride, int n, T* lines) {
    u32x16 words[LANES] = {};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (i < n) std::memcpy(&words[i], rows + i * stride, WORDS * sizeof(uint32_t));
    transpose16(words);
#pragma GCC unroll 16
    for (int i = 0; i < WORDS; i++) store_raw(lines + i * LANES * Pack<T>, words[i]);
}

// `n` rows [head_dim], `stride` elements apart -> panels of `padded` columns, the rest zeros.
template <class T> static void pack_columns(const T* rows, int64_t stride, int n, int padded, int head_dim, T* panels) {
    constexpr int STEP = LANES * Pack<T>;
    for (int first = 0; first < padded; first += LANES) {
        const T* from = rows + first * stride;
        T* panel = panels + first * head_dim;
        int k = 0;
        for (; k + STEP <= head_dim; k += STEP) pack_lines<LANES>(from + k, stride, n - first, panel + k * LANES);
        if (k < head_dim) pack_lines<LANES / Pack<T>>(from + k, stride, n - first, panel + k * LANES);
    }
}

// Tokens of a chunk, by number: a multiple of KEYS_AT_ONCE.
struct Tokens {
    int begin, end;
};

// Values of these of `n` tokens, `stride` elements apart -> their lines of panels of depth `depth` >= n; those of tokens
// from `n` on are zeros.
INLINE void pack_values(const float* values, int64_t stride, int n, Tokens tokens, int depth, int num_heads,
                        int head_dim, float* panels) {
    for (int d = 0; d < num_heads * head_dim; d += LANES)
        for (int key = tokens.begin; key < tokens.end; key++)
            store16(panels + d * depth + key * LANES, key < n ? load16(values + key * stride + d) : f32x16{});
}

// Sixteen elements of two tokens' values, the second `stride` after the first: those below `n` -> a line of a panel.
INLINE void pack_pair(const bf16* values, int64_t stride, int key, int n, bf16* line) {
    u32x16 low{}, high{};
    if (key < n) low = load16(&values->bits);
    if (key + 1 < n) high = load16(&values[stride].bits);
    store_raw(line, low | (high << 16));
}

#if defined(__AVX512BW__)
// The fast interleave of two rows orders 32 elements of a head as 0-3 8-11 16-19 24-27, then 4-7 12-15 20-23 28-31:
// `restore_order` corrects the output, once for all keys. If 16 elements of a head are left, they keep their order.
INLINE void pack_values(const bf16* values, int64_t stride, int n, Tokens tokens, int depth, int num_heads,
                        int head_dim, bf16* panels) {
    // Panels are 4 KB apart: few of them fit into the first-level cache at a time.
    for (int start = tokens.begin; start < tokens.end; start += KEYS_AT_ONCE)
        for (int begin = 0; begin < num_heads * head_dim; begin += head_dim) {
            int d = begin;
            for (; d + 2 * LANES <= begin + head_dim; d += 2 * LANES)
                for (int key = start; key < start + KEYS_AT_ONCE; key += 2) {
                    const bf16* even = values + key * stride + d;
                    __m512i low = key < n ? load<__m512i>(even) : _mm512_setzero_si512();
                    __m512i high = key + 1 < n ? load<__m512i>(even + stride) : _mm512_setzero_si512();
                    bf16* to = panels + d * depth + key * LANES;
                    store_raw(to, _mm512_unpacklo_epi16(low, high));
                    store_raw(to + depth * LANES, _mm512_unpackhi_epi16(low, high));
                }
            if (d == begin + head_dim) continue;
            for (int key = start; key < start + KEYS_AT_ONCE; key += 2)
                pack_pair(values + key * stride + d, stride, key, n, panels + d * depth + key * LANES);
        }
}

template <int START> struct InterleavedQuarters {  // of two registers: START to START + 3 of each, then the next four
    static constexpr int of(int i) { return START + i / 8 * 4 + i % 4 + (i & 4 ? LANES : 0); }
};

INLINE void restore_order(bf16, f32x16& first, f32x16& second) {
    const f32x16 a = first, b = second;
    first = shuffle<InterleavedQuarters<0>>(a, b);
    second = shuffle<InterleavedQuarters<8>>(a, b);
}
#else
INLINE void pack_values(const bf16* values, int64_t stride, int n, Tokens tokens, int depth, int num_heads,
                        int head_dim, bf16* panels) {
    for (int key = tokens.begin; key < tokens.end; key += 2)
        for (int d = 0; d < num_heads * head_dim; d += LANES)
            pack_pair(values + key * stride + d, stride, key, n, panels + d * depth + key * LANES);
}

INLINE void restore_order(bf16, f32x16&, f32x16&) {}
#endif

INLINE void restore_order(float, f32x16&, f32x16&) {}
