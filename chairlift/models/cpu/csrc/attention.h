// Attention over the slots, in place: online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) with
// the query heads of a group as rows of one product, so that keys and values are read once for all of them.
//
// Keys are taken in chunks of CHUNK, counted from the start of the sequence. A chunk gives its queries a partial result
// (maximum, sum, output), and partial results are merged in the order of the chunks. So the result is the same, bit for
// bit, however many threads share the chunks and whatever else is in the batch. Keys before a window are not read,
// except the rest of a block of KEYS_PADDING keys, which has weights of exactly 0.
#pragma once

#include "product.h"
#include "rows.h"

constexpr int CHUNK = 128;
constexpr int MOST_QUERIES = 512;    // queries of a task: tokens times heads of a group
constexpr int QUERIES_AT_ONCE = 32;  // if there are many
constexpr int MOST_HEADS = 8;        // key/value heads of a task; more than one only with at most 16 queries
constexpr int KEYS_PADDING = 32;     // keys per step of a product
constexpr float LOWEST = -1e30f;     // the maximum over no keys at all: finite, so that differences are numbers

// The softmax so far of some queries: output [queries, head_dim] not yet divided by the sum.
struct Partial {
    float* maximum;
    float* sum;
    float* output;

    static int64_t floats(int64_t queries, int64_t head_dim) { return queries * (2 + head_dim); }
    static Partial at(float* from, int64_t queries) { return {from, from + queries, from + 2 * queries}; }
    Partial from_query(int q, int head_dim) const { return {maximum + q, sum + q, output + q * head_dim}; }
};

template <class T> struct AttentionScratch {
    T* queries;     // by head, if there are few: one panel of queries, [head_dim / Pack][16][Pack]
    T* keys;        // if there are many queries: panels of 16 keys, [CHUNK / 16][head_dim / Pack][16][Pack]
    T* values;      // panels of 16 elements: [heads * head_dim / 16][CHUNK / Pack][16][Pack]
    T* weights;     // few queries: by head, [16][CHUNK]; many: [QUERIES_AT_ONCE][CHUNK]
    float* scores;  // few queries: by head, [CHUNK][16]; many: [QUERIES_AT_ONCE][CHUNK]
    Partial chunk[MOST_HEADS];   // of at most QUERIES_AT_ONCE
    Partial merged[MOST_HEADS];  // of all queries of the task
};

// `n` rows [head_dim], `stride` elements apart -> panels of `padded` columns, the rest zeros.
template <class T> static void pack_columns(const T* rows, int64_t stride, int n, int padded, int head_dim, T* panels) {
    constexpr int PACK = Pack<T>;
    for (int first = 0; first < padded; first += LANES) {
        T* panel = panels + first * head_dim;
        for (int k = 0; k < head_dim; k += LANES * PACK) {
            u32x16 words[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                words[i] = first + i < n ? load<u32x16>(rows + (first + i) * stride + k) : u32x16{};
            transpose16(words);
#pragma GCC unroll 16
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
// The fast interleave of two rows orders 32 elements as 0-3 8-11 16-19 24-27, then 4-7 12-15 20-23 28-31:
// `restore_order` corrects the output, once for all keys.
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

template <int START> struct InterleavedQuarters {  // of two registers: START to START + 3 of each, then the next four
    static constexpr int of(int i) { return START + i / 8 * 4 + i % 4 + (i & 4 ? LANES : 0); }
};

INLINE void restore_order(bf16, f32x16& first, f32x16& second) {
    const f32x16 a = first, b = second;
    first = shuffle<InterleavedQuarters<0>>(a, b);
    second = shuffle<InterleavedQuarters<8>>(a, b);
}
#else
INLINE void pack_values(const bf16* values, int64_t stride, int n, int depth, int head_dim, bf16* panels) {
    for (int key = 0; key < depth; key += 2) {
        const bf16* even = values + key * stride;
        for (int d = 0; d < head_dim; d += LANES) {
            u32x16 low{}, high{};
            if (key < n) low = load16(&even[d].bits);
            if (key + 1 < n) high = load16(&even[stride + d].bits);
            store_raw(panels + d * depth + key * LANES, low | (high << 16));
        }
    }
}

INLINE void restore_order(bf16, f32x16&, f32x16&) {}
#endif

INLINE void restore_order(float, f32x16&, f32x16&) {}

// The weights of one query are summed by the key's number modulo 16, and those sums in the order of `fold16`: here and
// in `softmax_few`, so that both give the same bits.

// Which keys queries see: those below their limits, and of these the last `window`.
struct Sight {
    const int32_t* limits;  // [queries, padded to 16]: they ascend
    int window;
    float cap;  // of scores; 0 for none

    int start(int q) const { return limits[q] - window; }
    Sight from_query(int q) const { return {limits + q, window, cap}; }
};

// Scores [queries][CHUNK] of at most 16 queries and `n` keys -> weights [queries][CHUNK], their maximum and sum.
// `first_key` is the number of this chunk's first.
template <class T>
static void softmax(float* scores, int n, const Sight& sight, int first_key, int num_queries, T* weights,
                    float* maximum, float* sum) {
    constexpr int32_t numbers[LANES]{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const i32x16 lane = load<i32x16>(numbers);
    const int padded = int(pad(n, KEYS_PADDING));
    f32x16 best[LANES], total[LANES];
    for (int q = 0; q < LANES; q++) best[q] = splat(LOWEST), total[q] = f32x16{};
    for (int q = 0; q < num_queries; q++) {
        float* row = scores + q * CHUNK;
        if (sight.cap != 0)
            for (int key = 0; key < padded; key += LANES) store16(row + key, cap16(load16(row + key), sight.cap));
        const int start = sight.start(q) - first_key;
        const int limit = sight.limits[q] - first_key < n ? sight.limits[q] - first_key : n;
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
static void softmax_few(const float* scores, int n, const Sight& sight, int first_key, int num_queries, T* weights,
                        float* maximum, float* sum) {
    constexpr int KEYS = 2 * LANES;
    constexpr int32_t numbers[LANES]{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    const i32x16 key_of = load<i32x16>(numbers);
    int32_t first_seen_by[LANES], first_unseen_by[LANES];
    for (int i = 0; i < LANES; i++) {
        const int limit = sight.limits[i % FEW] - first_key;
        first_seen_by[i] = limit - sight.window;
        first_unseen_by[i] = limit < n ? limit : n;
    }
    const i32x16 starts = load<i32x16>(first_seen_by), ends = load<i32x16>(first_unseen_by);
    f32x16 blocks[CHUNK / FEW], best = splat(LOWEST), total[FEW] = {};
    const int num_blocks = (n + KEYS - 1) / KEYS * (KEYS / FEW);
    const auto take = [&](int begin, int end, bool is_masked) __attribute__((always_inline)) {
        for (int b = begin; b < end; b++) {
            f32x16 block = load_few(scores + b * FEW * LANES);
            if (sight.cap != 0) block = cap16(block, sight.cap);
            const i32x16 key = b * FEW + key_of;
            if (is_masked) block = select((key >= starts) & (key < ends), block, splat(2 * LOWEST));
            best = max16(block, best);
            blocks[b] = block;
        }
    };
    // All queries see all keys between the start of the last query's window and the first query's limit.
    const int latest_start = sight.start(num_queries - 1) - first_key, shortest = first_unseen_by[0];
    const int start = latest_start > 0 ? (latest_start + FEW - 1) / FEW : 0;
    const int first_seen = start < num_blocks ? start : num_blocks;
    const int first_unseen = shortest / FEW > first_seen ? shortest / FEW : first_seen;
    take(0, first_seen, true);
    take(first_seen, first_unseen, false);
    take(first_unseen, num_blocks, true);
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

// The data of a task: some queries of some neighbouring key/value heads, and the slot that they read.
template <class T> struct View {
    const T *keys, *values;  // of the first head
    int64_t stride;          // from token to token
    int num_heads, head_dim, num_queries;
    const T* queries;     // of the first head: [num_queries][head_dim]
    int64_t head_stride;  // from one head's queries to the next's
    Sight sight;
};

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

// Attention of few queries of each head to the current chunk, whose values are packed to `depth`. Keys are read token
// by token, all heads of each, in the order of memory, and multiplied as they are.
template <class T>
static void attend_few(const AttentionScratch<T>& scratch, const View<T>& view, int first, int n, int depth,
                       const Partial* results) {
    constexpr int KEYS_AT_ONCE = 32;
    const int dim = view.head_dim;
    for (int key = 0; key < n; key += KEYS_AT_ONCE)
        for (int head = 0; head < view.num_heads; head++)
            multiply(view.keys + (first + key) * view.stride + head * dim, view.stride,
                     n - key < KEYS_AT_ONCE ? n - key : KEYS_AT_ONCE, scratch.queries + head * LANES * dim, 1, dim,
                     scratch.scores + (head * CHUNK + key) * LANES, LANES);
    for (int head = 0; head < view.num_heads; head++) {
        const Partial& result = results[head];
        T* weights = scratch.weights + head * LANES * CHUNK;
        softmax_few(scratch.scores + head * CHUNK * LANES, n, view.sight, first, view.num_queries, weights,
                    result.maximum, result.sum);
        multiply(weights, CHUNK, view.num_queries, scratch.values + head * dim * depth, dim / LANES, depth,
                 result.output, dim);
    }
}

// Attention of many queries of one head, which makes up for packing the keys: `count` queries from `q` on.
template <class T>
static void attend_many(const AttentionScratch<T>& scratch, const View<T>& view, int head, int q, int count, int first,
                        int n, int depth, const Partial& result) {
    const int dim = view.head_dim;
    const int longest = view.sight.limits[q + count - 1] - first, visible = longest < n ? longest : n;
    const int padded = int(pad(visible, KEYS_PADDING));
    const T* queries = view.queries + head * view.head_stride + q * dim;
    multiply(queries, dim, count, scratch.keys, padded / LANES, dim, scratch.scores, CHUNK);
    for (int r = 0; r < count; r += LANES)
        softmax(scratch.scores + r * CHUNK, visible, view.sight.from_query(q + r), first,
                count - r < LANES ? count - r : LANES, scratch.weights + r * CHUNK, result.maximum + r,
                result.sum + r);
    if (padded < depth)
        for (int r = 0; r < count; r++)
            std::memset((void*)(scratch.weights + r * CHUNK + padded), 0, (depth - padded) * sizeof(T));
    multiply(scratch.weights, CHUNK, count, scratch.values + head * dim * depth, dim / LANES, depth, result.output,
             dim);
}

// Attention of all heads to one chunk of `n` keys, from key number `first` of the sequence on. Its partial results are
// merged into the scratch's, or, for at most 16 queries, left in `results`, one per head.
template <class T>
static void attend_chunk(const AttentionScratch<T>& scratch, const View<T>& view, int first, int n,
                         const Partial* results) {
    const int dim = view.head_dim, depth = int(pad(n, KEYS_PADDING));
    const Partial* parts = results ? results : scratch.chunk;
    pack_values(view.values + first * view.stride, view.stride, n, depth, view.num_heads * dim, scratch.values);
    if (view.num_queries <= FEW) attend_few(scratch, view, first, n, depth, parts);
    for (int head = 0; head < view.num_heads; head++) {
        if (view.num_queries > FEW)
            pack_columns(view.keys + first * view.stride + head * dim, view.stride, n, depth, dim, scratch.keys);
        for (int q = 0; q < view.num_queries; q += QUERIES_AT_ONCE) {
            const int left = view.num_queries - q, count = left < QUERIES_AT_ONCE ? left : QUERIES_AT_ONCE;
            if (view.sight.limits[q + count - 1] <= first || view.sight.start(q) >= first + n) continue;  // unseen
            if (view.num_queries > FEW) attend_many(scratch, view, head, q, count, first, n, depth, parts[head]);
            if (!results) merge(scratch.merged[head].from_query(q, dim), parts[head], count, dim);
        }
    }
}
