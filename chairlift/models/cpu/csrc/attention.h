// Attention over the slots, in place: online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) with
// the query heads of a group as rows of one product, so that keys and values are read once for all of them.
//
// Keys are taken in chunks of CHUNK, counted from the start of the sequence. A chunk gives its queries a partial result
// (maximum, sum, output), and partial results are merged in the order of the chunks. Whether one thread did them all
// or several did some each makes no difference to a single bit, nor does who else is in the batch.
#pragma once

#include "product.h"

constexpr int CHUNK = 128;
constexpr int MOST_QUERIES = 64;  // queries of a task: tokens times heads of a group
constexpr int MOST_HEADS = 8;     // key/value heads of a task; more than one only with at most 16 queries
constexpr float LOWEST = -1e30f;  // the maximum over no keys at all: finite, so that differences are numbers

// The softmax so far of `MOST_QUERIES` queries: output [queries, head_dim] not yet divided by the sum.
struct Partial {
    float* maximum;
    float* sum;
    float* output;

    static int64_t floats(int64_t queries, int64_t head_dim) { return queries * (2 + head_dim); }
    static Partial at(float* from, int64_t queries) { return {from, from + queries, from + 2 * queries}; }
};

template <class T> struct AttentionScratch {
    T* queries;     // by head, panels of 16 queries: [queries / 16][head_dim / Pack][16][Pack]
    T* values;      // panels of 16 elements: [heads * head_dim / 16][CHUNK / Pack][16][Pack]
    T* weights;     // by head, [queries][CHUNK]
    float* scores;  // by head, of one panel of queries: [CHUNK][16]
    Partial chunk[MOST_HEADS], merged[MOST_HEADS];
};

// Queries [n, head_dim] -> panels.
template <class T> static void pack_queries(const T* queries, int n, int head_dim, T* panels) {
    constexpr int PACK = Pack<T>;
    for (int first = 0; first < n; first += LANES) {
        T* panel = panels + first * head_dim;
        for (int k = 0; k < head_dim; k += LANES * PACK) {
            u32x16 words[LANES];
            for (int q = 0; q < LANES; q++)
                words[q] = first + q < n ? load<u32x16>(queries + (first + q) * head_dim + k) : u32x16{};
            transpose16(words);
            for (int i = 0; i < LANES; i++) store_raw(panel + (k / PACK + i) * LANES * PACK, words[i]);
        }
    }
}

// Values of `n` tokens, `stride` elements apart -> panels of depth `depth` >= n, the rest zeros.
INLINE void pack_values(const float* values, int64_t stride, int n, int depth, int head_dim, float* panels) {
    for (int d = 0; d < head_dim; d += LANES)
        for (int key = 0; key < depth; key++)
            store16(panels + d * depth + key * LANES, key < n ? load16(values + key * stride + d) : f32x16{});
}

#if defined(__AVX512BW__)
// The quick way to interleave two rows leaves 32 elements as 0-3 8-11 16-19 24-27, then 4-7 12-15 20-23 28-31:
// `restore_order` puts the output right, once for all keys.
INLINE void pack_values(const bf16* values, int64_t stride, int n, int depth, int head_dim, bf16* panels) {
    constexpr int KEYS_AT_ONCE = 32;  // panels are 4 KB apart: few of them fit into the first-level cache at a time
    for (int start = 0; start < depth; start += KEYS_AT_ONCE)
        for (int d = 0; d < head_dim; d += 2 * LANES)
            for (int key = start; key < start + KEYS_AT_ONCE; key += 2) {
                const bf16* even = values + key * stride + d;
                __m512i low = key < n ? load<__m512i>(even) : _mm512_setzero_si512();
                __m512i high = key + 1 < n ? load<__m512i>(even + stride) : _mm512_setzero_si512();
                bf16* to = panels + d * depth + key * LANES;
                store_raw(to, _mm512_unpacklo_epi16(low, high));
                store_raw(to + depth * LANES, _mm512_unpackhi_epi16(low, high));
            }
}

INLINE void restore_order(bf16, f32x16& first, f32x16& second) {
    constexpr i32x16 low{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    constexpr i32x16 high{8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const f32x16 a = first, b = second;
    first = __builtin_shuffle(a, b, low);
    second = __builtin_shuffle(a, b, high);
}
#else
INLINE void pack_values(const bf16* values, int64_t stride, int n, int depth, int head_dim, bf16* panels) {
    for (int key = 0; key < depth; key += 2) {
        const bf16* even = values + key * stride;
        for (int d = 0; d < head_dim; d += LANES) {
            u32x16 low{}, high{};
            if (key < n) low = __builtin_convertvector(load<u16x16>(even + d), u32x16);
            if (key + 1 < n) high = __builtin_convertvector(load<u16x16>(even + stride + d), u32x16);
            store_raw(panels + d * depth + key * LANES, low | (high << 16));
        }
    }
}

INLINE void restore_order(bf16, f32x16&, f32x16&) {}
#endif

INLINE void restore_order(float, f32x16&, f32x16&) {}

// Weights of Pack keys for 16 queries, as the words that are to be transposed.
INLINE u32x16 pack_weights(float, const f32x16* weights) { return bit_cast<u32x16>(weights[0]); }
INLINE u32x16 pack_weights(bf16, const f32x16* weights) { return interleave_bf16(weights[0], weights[1]); }

// Sums go by the key's number modulo 4, here as in `softmax_few`, so that both give the same bits.
constexpr int SUMS = 4;

// Scores [n keys][16] of one panel of queries -> weights [queries][CHUNK] and their maximum and sum.
// A query sees keys below its limit, counted from this chunk's first; all see those below `shortest`.
template <class T>
static void softmax(float* scores, int n, i32x16 limits, int shortest, int num_queries, T* weights,
                    float* maximum, float* sum) {
    constexpr int PACK = Pack<T>, KEYS = LANES * PACK;
    for (int key = shortest > 0 ? shortest : 0; key < n; key++) {
        float* at = scores + key * LANES;
        store16(at, key < limits ? load16(at) : splat(2 * LOWEST));
    }
    f32x16 best[SUMS], total[SUMS] = {};
    for (f32x16& b : best) b = splat(LOWEST);
    for (int key = 0; key < n; key++) best[key % SUMS] = max16(load16(scores + key * LANES), best[key % SUMS]);
    best[0] = max16(max16(best[0], best[1]), max16(best[2], best[3]));
    for (int first = 0; first < n; first += KEYS) {
        u32x16 words[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            f32x16 pair[PACK];
            for (int j = 0; j < PACK; j++) {
                const int key = first + i * PACK + j;
                pair[j] = key < n ? exp2_16(load16(scores + key * LANES) - best[0]) : f32x16{};
                total[(i * PACK + j) % SUMS] += pair[j];
            }
            words[i] = pack_weights(T{}, pair);
        }
        transpose16(words);
        for (int q = 0; q < num_queries && q < LANES; q++) store_raw(weights + q * CHUNK + first, words[q]);
    }
    store16(maximum, best[0]);
    store16(sum, (total[0] + total[2]) + (total[1] + total[3]));
}

// The first four scores of four keys.
INLINE f32x16 load_few(const float* scores) {
#if defined(__AVX512F__)
    __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(scores));
    four = _mm512_insertf32x4(four, _mm_loadu_ps(scores + LANES), 1);
    four = _mm512_insertf32x4(four, _mm_loadu_ps(scores + 2 * LANES), 2);
    return bit_cast<f32x16>(_mm512_insertf32x4(four, _mm_loadu_ps(scores + 3 * LANES), 3));
#else
    f32x16 four{};
    for (int i = 0; i < LANES; i++) four[i] = scores[i / 4 * LANES + i % 4];
    return four;
#endif
}

constexpr int FEW = 4;

// As `softmax`, for at most four queries in one panel, which is what a decode step of most models has: a vector holds
// four keys' scores instead of one's.
template <class T>
static void softmax_few(const float* scores, int n, const int32_t* limits, int first_key, int shortest, int num_queries,
                        T* weights, float* maximum, float* sum) {
    constexpr int KEYS = 2 * LANES;
    constexpr i32x16 key_of{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    i32x16 ends{};
    for (int i = 0; i < LANES; i++) {
        const int limit = limits[i % FEW] - first_key;
        ends[i] = limit < n ? limit : n;
    }
    f32x16 blocks[CHUNK / FEW], best = splat(LOWEST), total{};
    const int num_blocks = (n + KEYS - 1) / KEYS * (KEYS / FEW);
    for (int b = 0; b < num_blocks; b++) {
        blocks[b] = load_few(scores + b * FEW * LANES);
        if ((b + 1) * FEW > shortest) blocks[b] = b * FEW + key_of < ends ? blocks[b] : splat(2 * LOWEST);
        best = max16(blocks[b], best);
    }
    constexpr i32x16 swap_halves{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    constexpr i32x16 swap_quarters{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    best = max16(best, __builtin_shuffle(best, swap_halves));
    best = max16(best, __builtin_shuffle(best, swap_quarters));
    for (int first = 0; first < num_blocks * FEW; first += KEYS) {
        f32x16 rows[2][FEW];  // of 16 keys each, by query
        for (int half = 0; half < 2; half++) {
            f32x16 v[FEW];
            for (int i = 0; i < FEW; i++) {
                v[i] = exp2_16(blocks[first / FEW + half * FEW + i] - best);
                total += v[i];
            }
            constexpr i32x16 low{0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
            constexpr i32x16 ends_low{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
            for (int pair = 0; pair < 2; pair++) {  // queries 0 and 1, then 2 and 3
                f32x16 a = __builtin_shuffle(v[0], v[1], low + 2 * pair), b = __builtin_shuffle(v[2], v[3], low + 2 * pair);
                rows[half][2 * pair] = __builtin_shuffle(a, b, ends_low);
                rows[half][2 * pair + 1] = __builtin_shuffle(a, b, ends_low + 8);
            }
        }
        for (int q = 0; q < num_queries; q++) store32(weights + q * CHUNK + first, rows[0][q], rows[1][q]);
    }
    total += __builtin_shuffle(total, swap_halves);
    total += __builtin_shuffle(total, swap_quarters);
    store16(maximum, best);
    store16(sum, total);
}

// What a task is about: some queries of some neighbouring key/value heads, and the slot they look into.
template <class T> struct View {
    const T *keys, *values;  // of the first head
    int64_t stride;          // from token to token
    int num_heads, head_dim, num_queries;
    const int32_t* limits;  // [MOST_QUERIES]: a query sees keys below
};

// One chunk of `n` keys, the first of which is key number `first` of its sequence: queries (packed) -> partial results,
// one per head. Keys and values are read token by token, all heads of each, as they lie in memory.
template <class T>
static void attend_chunk(const AttentionScratch<T>& scratch, const View<T>& view, int first, int n,
                         const Partial* results) {
    constexpr int KEYS = LANES * Pack<T>, KEYS_AT_ONCE = 32;
    const int dim = view.head_dim, num_queries = view.num_queries;
    const int depth = (n + KEYS - 1) / KEYS * KEYS;
    pack_values(view.values + first * view.stride, view.stride, n, depth, view.num_heads * dim, scratch.values);
    for (int p = 0; p < num_queries; p += LANES) {
        for (int key = 0; key < n; key += KEYS_AT_ONCE)
            for (int head = 0; head < view.num_heads; head++)
                multiply<T>(view.keys + (first + key) * view.stride + head * dim, view.stride,
                            n - key < KEYS_AT_ONCE ? n - key : KEYS_AT_ONCE, scratch.queries + (head * LANES + p) * dim,
                            1, dim, nullptr, scratch.scores + (head * CHUNK + key) * LANES, LANES);
        int shortest = n;
        for (int q = p; q < p + LANES; q++)
            shortest = view.limits[q] - first < shortest ? view.limits[q] - first : shortest;
        for (int head = 0; head < view.num_heads; head++) {
            const Partial& result = results[head];
            float* scores = scratch.scores + head * CHUNK * LANES;
            T* weights = scratch.weights + (head * LANES + p) * CHUNK;
            if (num_queries <= FEW)
                softmax_few(scores, n, view.limits, first, shortest, num_queries, weights, result.maximum, result.sum);
            else
                softmax(scores, n, load<i32x16>(view.limits + p) - first, shortest, num_queries - p, weights,
                        result.maximum + p, result.sum + p);
        }
    }
    for (int head = 0; head < view.num_heads; head++)
        multiply<T>(scratch.weights + head * LANES * CHUNK, CHUNK, num_queries, scratch.values + head * dim * depth,
                    dim / LANES, depth, nullptr, results[head].output, dim);
}

INLINE void start_merging(const Partial& merged, int num_queries, int head_dim) {
    const int width = (num_queries + LANES - 1) / LANES * LANES;
    for (int q = 0; q < width; q++) merged.maximum[q] = LOWEST, merged.sum[q] = 0;
    std::memset(merged.output, 0, sizeof(float) * num_queries * head_dim);
}

static void merge(const Partial& merged, const Partial& chunk, int num_queries, int head_dim) {
    for (int p = 0; p < num_queries; p += LANES) {
        const f32x16 before = load16(merged.maximum + p), own = load16(chunk.maximum + p), best = max16(before, own);
        float old_share[LANES], new_share[LANES];
        store16(old_share, exp2_16(before - best));
        store16(new_share, exp2_16(own - best));
        store16(merged.maximum + p, best);
        store16(merged.sum + p, load16(merged.sum + p) * load16(old_share) + load16(chunk.sum + p) * load16(new_share));
        for (int q = 0; q < LANES && p + q < num_queries; q++) {
            float* output = merged.output + (p + q) * head_dim;
            const float* addend = chunk.output + (p + q) * head_dim;
            for (int d = 0; d < head_dim; d += LANES)
                store16(output + d, fma16(load16(output + d), splat(old_share[q]), load16(addend + d) * new_share[q]));
        }
    }
}
