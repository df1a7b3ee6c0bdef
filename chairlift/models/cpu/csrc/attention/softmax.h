// Scores become weights: masked, less their maximum, and as powers of 2.
//
// The weights of one query are summed by the key's number modulo 16, and those sums in the order of `fold16`: both in
// `softmax` and in `softmax_few`, so that they give the same bits.
#pragma once

#include "../memory.h"
#include "softmax_state.h"

constexpr int CHUNK = 128;        // keys that give one SoftmaxState, which is merged with the others
constexpr int KEYS_PADDING = 32;  // keys per step of a product

// The keys that queries see: those below their limits, and of these the last `window`.
struct Mask {
    const int32_t* limits;  // [queries, padded to 16]: they ascend
    int window;

    int start(int q) const { return limits[q] - window; }
    Mask from_query(int q) const { return {limits + q, window}; }
};

// Scores [queries][CHUNK] of at most 16 queries and `n` keys -> weights [queries][CHUNK], their maximum and sum.
// `cap`: the soft cap of scores, or 0 for none; `first_key`: the number of this chunk's first key.
template <class T>
static void softmax(float* scores, int n, const Mask& mask, float cap, int first_key, int num_queries, T* weights,
                    float* maximum, float* sum) {
    constexpr int32_t numbers[LANES]{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const i32x16 lane = load<i32x16>(numbers);
    const int padded = int(pad(n, KEYS_PADDING));
    f32x16 best[LANES], total[LANES];
    for (int q = 0; q < LANES; q++) best[q] = splat(LOWEST), total[q] = f32x16{};
    for (int q = 0; q < num_queries; q++) {
        float* row = scores + q * CHUNK;
        if (cap != 0)
            for (int key = 0; key < padded; key += LANES) store16(row + key, cap16(load16(row + key), cap));
        const int start = mask.start(q) - first_key;
        const int limit = mask.limits[q] - first_key < n ? mask.limits[q] - first_key : n;
        for (int key = 0; key < start && key < padded; key += LANES)
            store16(row + key, select(key + lane >= start, load16(row + key), splat(2 * LOWEST)));
        for (int key = limit > 0 ? limit / LANES * LANES : 0; key < padded; key += LANES)
            store16(row + key, select(key + lane < limit, load16(row + key), splat(2 * LOWEST)));
        f32x16 even = splat(LOWEST), odd = even;
        for (int key = 0; key < padded; key += 2 * LANES) {
            even = max16(load16(row + key), even);
            odd = max16(load16(row + key + LANES), odd);
        }
        best[q] = max16(even, odd);
    }
    store16(maximum, fold16(best, [](f32x16 a, f32x16 b) { return max16(a, b); }));
    for (int q = 0; q < num_queries; q++) {
        const float* row = scores + q * CHUNK;
        const f32x16 peak = splat(maximum[q]);
        f32x16 all{};
        for (int key = 0; key < padded; key += 2 * LANES) {
            const f32x16 low = exp2_16<T>(load16(row + key) - peak);
            const f32x16 high = exp2_16<T>(load16(row + key + LANES) - peak);
            all += low;
            all += high;
            store32(weights + q * CHUNK + key, low, high);
        }
        total[q] = all;
    }
    store16(sum, fold16(total, [](f32x16 a, f32x16 b) { return a + b; }));
}

// The first four scores of four keys.
INLINE f32x16 load_few(const float* scores) {
#if defined(__AVX512F__)
    __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(scores));
    four = _mm512_insertf32x4(four, _mm_loadu_ps(scores + LANES), 1);
    four = _mm512_insertf32x4(four, _mm_loadu_ps(scores + 2 * LANES), 2);
    return bit_cast<f32x16>(_mm512_insertf32x4(four, _mm_loadu_ps(scores + 3 * LANES), 3));
#elif defined(__AVX2__)
    const auto two = [](const float* from) {
        return bit_cast<f32_register>(_mm256_set_m128(_mm_loadu_ps(from + LANES), _mm_loadu_ps(from)));
    };
    return {two(scores), two(scores + 2 * LANES)};
#else
    float four[LANES];
    for (int i = 0; i < 4; i++) std::memcpy(four + 4 * i, scores + i * LANES, 4 * sizeof(float));
    return load16(four);
#endif
}

constexpr int FEW = 4;

// As `softmax`, for at most four queries in one panel and scores [keys][16], which is what a decode step of most models
// has: a vector holds the scores of four keys.
template <class T>
static void softmax_few(const float* scores, int n, const Mask& mask, float cap, int first_key, int num_queries,
                        T* weights, float* maximum, float* sum) {
    constexpr int KEYS = 2 * LANES;
    constexpr int32_t numbers[LANES]{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    const i32x16 key_of = load<i32x16>(numbers);
    int32_t first_seen_by[LANES], first_unseen_by[LANES];
    for (int i = 0; i < LANES; i++) {
        const int limit = mask.limits[i % FEW] - first_key;
        first_seen_by[i] = limit - mask.window;
        first_unseen_by[i] = limit < n ? limit : n;
    }
    const i32x16 starts = load<i32x16>(first_seen_by), ends = load<i32x16>(first_unseen_by);
    f32x16 blocks[CHUNK / FEW], best = splat(LOWEST), total[FEW] = {};
    const int num_blocks = (n + KEYS - 1) / KEYS * (KEYS / FEW);
    const auto visit = [&](int begin, int end, bool is_masked) __attribute__((always_inline)) {
        for (int b = begin; b < end; b++) {
            f32x16 block = load_few(scores + b * FEW * LANES);
            if (cap != 0) block = cap16(block, cap);
            const i32x16 key = b * FEW + key_of;
            if (is_masked) block = select((key >= starts) & (key < ends), block, splat(2 * LOWEST));
            best = max16(block, best);
            blocks[b] = block;
        }
    };
    // All queries see all keys between the start of the last query's window and the first query's limit.
    const int latest_start = mask.start(num_queries - 1) - first_key, shortest = first_unseen_by[0];
    const int start = latest_start > 0 ? (latest_start + FEW - 1) / FEW : 0;
    const int first_seen = start < num_blocks ? start : num_blocks;
    const int first_unseen = shortest / FEW > first_seen ? shortest / FEW : first_seen;
    visit(0, first_seen, true);
    visit(first_seen, first_unseen, false);
    visit(first_unseen, num_blocks, true);
    best = max16(best, swap<8>(best));
    best = max16(best, swap<4>(best));
    for (int first = 0; first < num_blocks * FEW; first += KEYS) {
        f32x16 rows[2][FEW];  // of 16 keys each, by query
        for (int half = 0; half < 2; half++) {
            f32x16 v[FEW];
            for (int i = 0; i < FEW; i++) {
                v[i] = exp2_16<T>(blocks[first / FEW + half * FEW + i] - best);
                total[i] += v[i];
            }
            sort_by_four(v, rows[half]);
        }
        for (int q = 0; q < num_queries; q++) store32(weights + q * CHUNK + first, rows[0][q], rows[1][q]);
    }
    f32x16 all = (total[0] + total[2]) + (total[1] + total[3]);
    all += swap<8>(all);
    all += swap<4>(all);
    store16(maximum, best);
    store16(sum, all);
}
