// Keys, values and queries as panels of a product (see product/panel.h).
#pragma once

#include "../product/product.h"

// Tokens whose keys and values are read at a time: few enough for the first-level cache. Those of the next so many are
// fetched meanwhile, a few lines at a time, as no prefetcher foresees what is read head by head.
constexpr int KEYS_AT_ONCE = 32;

// Fetches a line of each of 16 rows that are read KEYS_AT_ONCE rows after these.
template <class T> INLINE void fetch_next(const T* rows, int64_t stride) {
    const RowPointers<T, LANES> next(rows + KEYS_AT_ONCE * stride, stride);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) __builtin_prefetch(next.at(i), 0, 2);
}

// The first `WORDS` words of 16 rows, `stride` elements apart, of which `n` are there -> a vector of each, the rest zeros.
template <int WORDS, bool ARE_ALL_THERE, class T>
INLINE void load_columns(const T* rows, int64_t stride, int n, u32x16 (&words)[LANES]) {
    const RowPointers<T, LANES> own(rows, stride);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (WORDS < LANES || !ARE_ALL_THERE) words[i] = u32x16{};
        if (ARE_ALL_THERE || i < n) std::memcpy(&words[i], own.at(i), WORDS * sizeof(uint32_t));
    }
    transpose16(words);
}

// Likewise -> as many lines of a panel.
template <int WORDS, class T> INLINE void pack_lines(const T* rows, int64_t stride, int n, T* lines) {
    const auto pack = [&](auto are_all_there) __attribute__((always_inline)) {
        u32x16 words[LANES];
        fetch_next(rows, stride);
        load_columns<WORDS, decltype(are_all_there)::value>(rows, stride, n, words);
#pragma GCC unroll 16
        for (int i = 0; i < WORDS; i++) store_raw(lines + i * LANES * Pack<T>, words[i]);
    };
    if (n >= LANES)
        pack(std::true_type{});
    else
        pack(std::false_type{});
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

// Elements of the values of a token, or of two that are `stride` elements apart, of which `n` are there -> words of
// PANELS panels, whose order is that of `pack_values`.
template <int PANELS>
INLINE void load_values(const float* values, int64_t, int n, f32x16 (&words)[PANELS]) {
    for (int p = 0; p < PANELS; p++) words[p] = n > 0 ? load16(values + p * LANES) : f32x16{};
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
        for (int key = tokens.begin; key < tokens.end; key++) {
            __builtin_prefetch(values + (key + KEYS_AT_ONCE) * stride + d, 0, 2);
            store16(panels + d * depth + key * LANES, key < n ? load16(values + key * stride + d) : f32x16{});
        }
}

// Sixteen elements of the values of two tokens.
INLINE u32x16 load_pair(const bf16* values, int64_t stride, int n) {
    u32x16 low{}, high{};
    if (n > 0) low = load16(&values->bits);
    if (n > 1) high = load16(&values[stride].bits);
    return low | (high << 16);
}

#if defined(__AVX512BW__)
template <int PANELS>
INLINE void load_values(const bf16* values, int64_t stride, int n, u32x16 (&words)[PANELS]) {
    for (int p = 0; p + 1 < PANELS; p += 2) {
        const bf16* even = values + p * LANES;
        const __m512i low = n > 0 ? load<__m512i>(even) : _mm512_setzero_si512();
        const __m512i high = n > 1 ? load<__m512i>(even + stride) : _mm512_setzero_si512();
        words[p] = bit_cast<u32x16>(_mm512_unpacklo_epi16(low, high));
        words[p + 1] = bit_cast<u32x16>(_mm512_unpackhi_epi16(low, high));
    }
    if (PANELS % 2) words[PANELS - 1] = load_pair(values + (PANELS - 1) * LANES, stride, n);
}

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
                    __builtin_prefetch(even + KEYS_AT_ONCE * stride, 0, 2);
                    __builtin_prefetch(even + (KEYS_AT_ONCE + 1) * stride, 0, 2);
                    u32x16 words[2];
                    load_values(even, stride, n - key, words);
                    bf16* to = panels + d * depth + key * LANES;
                    store_raw(to, words[0]);
                    store_raw(to + depth * LANES, words[1]);
                }
            if (d == begin + head_dim) continue;
            for (int key = start; key < start + KEYS_AT_ONCE; key += 2)
                store_raw(panels + d * depth + key * LANES, load_pair(values + key * stride + d, stride, n - key));
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
template <int PANELS>
INLINE void load_values(const bf16* values, int64_t stride, int n, u32x16 (&words)[PANELS]) {
    for (int p = 0; p < PANELS; p++) words[p] = load_pair(values + p * LANES, stride, n);
}

INLINE void pack_values(const bf16* values, int64_t stride, int n, Tokens tokens, int depth, int num_heads,
                        int head_dim, bf16* panels) {
    for (int key = tokens.begin; key < tokens.end; key += 2)
        for (int d = 0; d < num_heads * head_dim; d += LANES)
            store_raw(panels + d * depth + key * LANES, load_pair(values + key * stride + d, stride, n - key));
}

INLINE void restore_order(bf16, f32x16&, f32x16&) {}
#endif

INLINE void restore_order(float, f32x16&, f32x16&) {}
