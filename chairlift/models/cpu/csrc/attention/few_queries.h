// Attention of at most 16 queries of each head to a chunk: a decode step, mostly of so few queries that reading keys and
// values takes longest.
//
// Tokens are read in the order of memory, KEYS_AT_ONCE at a time and all heads of each. The sums are the chains of
// additions of the products that many queries take, so that the bits are the same.
#pragma once

#include "operands.h"
#include "pack.h"

static_assert(KEYS_PADDING % KEYS_AT_ONCE == 0, "values are packed up to a multiple of KEYS_PADDING");

// Queries for which nothing is packed in vectors: most models have 1 to 8 query heads to a key/value head. More than FEW
// are multiplied as if they were so many, since an instance for each number would take long to compile. Registers of 256
// bits are too small for it.
#if defined(__AVX512F__)
constexpr int MOST_IN_VECTORS = 8;
#else
constexpr int MOST_IN_VECTORS = FEW;
#endif
template <class T> constexpr int MOST_UNPACKED = HAS_TILES<T> ? FEW : MOST_IN_VECTORS;

template <class T> INLINE bool are_read_in_place(const Queries<T>& queries) {
    return std::is_same_v<typename Multiplied<T>::type, T> && queries.count <= FEW;
}

// The queries of a task as they are multiplied, where these are not those that are there: on tiles a panel, in vectors
// copies of more than FEW, and wide ones where the processor does not multiply bfloat16.
template <class T>
static void prepare_few(const AttentionScratch<T>& scratch, const Queries<T>& queries, int num_heads, int dim) {
    const int count = queries.count;
    if (count > MOST_UNPACKED<T> || (!HAS_TILES<T> && are_read_in_place(queries))) return;
    for (int head = 0; head < num_heads; head++) {
        const T* from = queries.data + head * queries.head_stride;
        auto* to = scratch.queries + head * LANES * dim;
        if constexpr (HAS_TILES<T>)
            pack_columns(from, dim, count, LANES, dim, to);
        else if constexpr (std::is_same_v<typename Multiplied<T>::type, T>)
            std::memcpy((void*)to, from, count * dim * sizeof(T));
        else
            multiplied(from, count * dim, to);
    }
}

// The queries of a head after that.
template <class T>
INLINE const typename Multiplied<T>::type* rows_of(const AttentionScratch<T>& scratch, const Queries<T>& queries,
                                                   int head, int dim) {
    if constexpr (std::is_same_v<typename Multiplied<T>::type, T>)
        if (are_read_in_place(queries)) return queries.data + head * queries.head_stride;
    return scratch.queries + head * LANES * dim;
}

// On tiles, or for more queries than MOST_IN_VECTORS. Tiles multiply the keys of at most FEW queries as they are, a row
// for each and a column for each query.
template <class T>
static void attend_packed(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view,
                          const Chunk& chunk, const SoftmaxState* states) {
    const int dim = view.head_dim, depth = chunk.depth(), count = queries.count;
    const bool are_keys_rows = HAS_TILES<T> && count <= FEW;
    const T *keys = view.keys + chunk.first * view.stride, *values = view.values + chunk.first * view.stride;
    for (int key = 0; key < depth; key += KEYS_AT_ONCE) {
        const int left = chunk.count - key, num_keys = left < KEYS_AT_ONCE ? left : KEYS_AT_ONCE;
        for (int head = 0; head < view.num_heads; head++) {
            const T* from = keys + key * view.stride + head * dim;
            float* scores = scratch.scores + head * LANES * CHUNK;
            if constexpr (HAS_TILES<T>)
                if (are_keys_rows) {
                    const T* panel = scratch.queries + head * LANES * dim;
                    multiply(from, view.stride, num_keys, panel, 1, dim, scores + key * LANES, LANES);
                    continue;
                }
            const T* rows = queries.data + head * queries.head_stride;
            pack_columns(from, view.stride, num_keys, KEYS_AT_ONCE, dim, scratch.keys);
            multiply(rows, dim, count, scratch.keys, KEYS_AT_ONCE / LANES, dim, scores + key, CHUNK);
        }
        pack_values(values, view.stride, chunk.count, {key, key + KEYS_AT_ONCE}, depth, view.num_heads, dim,
                    scratch.values);
    }
    for (int head = 0; head < view.num_heads; head++) {
        const SoftmaxState& state = states[head];
        float* scores = scratch.scores + head * LANES * CHUNK;
        T* weights = scratch.weights + head * LANES * CHUNK;
        if (are_keys_rows)
            softmax_few(scores, chunk.count, queries.mask, queries.cap, chunk.first, count, weights, state.maximum,
                        state.sum);
        else
            softmax(scores, chunk.count, queries.mask, queries.cap, chunk.first, count, weights, state.maximum, state.sum);
        multiply(weights, CHUNK, count, scratch.values + head * dim * depth, dim / LANES, depth, state.output, dim);
    }
}

// The scores of COUNT queries [COUNT][dim] and the first `n` of KEYS_AT_ONCE keys, each `stride` elements after the last
// -> [COUNT][CHUNK]. The keys become columns in registers: a vector has a lane for each key, since most lanes would stand
// for queries that are not there. Keys and values of the tokens to come are fetched meanwhile, evenly.
template <int COUNT, class A, class T>
static void score_keys(const A* queries, const T* keys, const T* values, int64_t stride, int n, int dim, float* scores) {
    typedef typename Factor<T>::type Word;
    constexpr int64_t STEP = LANES * Pack<T>;
    for (int first = 0; first < KEYS_AT_ONCE; first += LANES, scores += LANES) {
        f32x16 sum[COUNT][1] = {};
        RowPointers<A, COUNT> rows(queries, dim);
        const auto add = [&](int64_t place, auto num_words, auto are_all_there) __attribute__((always_inline)) {
            constexpr int WORDS = decltype(num_words)::value;
            u32x16 words[LANES];
            fetch_next(values + place, stride);
            fetch_next(keys + place, stride);
            load_columns<WORDS, decltype(are_all_there)::value>(keys + place, stride, n - first, words);
#pragma GCC unroll 16
            for (int i = 0; i < WORDS; i++) {
                const Word word[1] = {bit_cast<Word>(words[i])};
                add_products<0, Pack<T>>(sum, rows, word);
                rows.advance(Pack<T>);
            }
        };
        const auto add_all = [&](auto are_all_there) __attribute__((always_inline)) {
            int64_t k = 0;
            for (; k + STEP <= dim; k += STEP)
                add(first * stride + k, std::integral_constant<int, LANES>{}, are_all_there);
            if (k < dim) add(first * stride + k, std::integral_constant<int, LANES / Pack<T>>{}, are_all_there);
        };
        if (n - first >= LANES)
            add_all(std::true_type{});
        else
            add_all(std::false_type{});
        for (int q = 0; q < COUNT; q++) store16(scores + q * CHUNK, sum[q][0]);
    }
}

// The sum of the first `n` of `depth` values, each `stride` elements after the last, times their weights [COUNT][CHUNK]
// -> PANELS vectors of the output of each query, `dim` elements apart.
template <int COUNT, int PANELS, class A, class T>
static void weigh_values(const A* weights, const T* values, int64_t stride, int n, int depth, float* output, int dim) {
    f32x16 sum[COUNT][PANELS] = {};
    RowPointers<A, COUNT> rows(weights, CHUNK);
    const auto add = [&](int left) __attribute__((always_inline)) {
        typename Factor<T>::type words[PANELS];
        load_values(values, stride, left, words);
        add_products<0, Pack<T>>(sum, rows, words);
        values += Pack<T> * stride;
        rows.advance(Pack<T>);
    };
    int key = 0;
    for (; key + Pack<T> <= n; key += Pack<T>) add(Pack<T>);
    for (; key < depth; key += Pack<T>) add(n - key);
    for (int q = 0; q < COUNT; q++)
        for (int p = 0; p < PANELS; p++) store16(output + q * dim + p * LANES, sum[q][p]);
}

// In vectors: at most COUNT queries of each head. What comes out for those that are not there is read by nobody.
template <int COUNT, class T>
static void attend_in_vectors(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view,
                              const Chunk& chunk, const SoftmaxState* states) {
    typedef typename Multiplied<T>::type A;
    const int dim = view.head_dim, depth = chunk.depth();
    const T *keys = view.keys + chunk.first * view.stride, *values = view.values + chunk.first * view.stride;
    for (int key = 0; key < depth; key += KEYS_AT_ONCE)
        for (int head = 0; head < view.num_heads; head++) {
            const int64_t place = key * view.stride + head * dim;
            score_keys<COUNT>(rows_of(scratch, queries, head, dim), keys + place, values + place, view.stride,
                              chunk.count - key, dim, scratch.scores + head * LANES * CHUNK + key);
        }
    for (int head = 0; head < view.num_heads; head++) {
        const SoftmaxState& state = states[head];
        softmax(scratch.scores + head * LANES * CHUNK, chunk.count, queries.mask, queries.cap, chunk.first, queries.count,
                scratch.weights, state.maximum, state.sum);
        A wide[std::is_same_v<A, T> ? 1 : COUNT * CHUNK];
        const A* weights = multiplied(scratch.weights, COUNT * CHUNK, wide);
        constexpr int WIDE = (COUNT > 4 ? 2 : 4) * LANES, NARROW = 2 * LANES;  // so that all sums are in registers
        const auto weigh = [&](int d, auto panels) {
            weigh_values<COUNT, panels>(weights, values + head * dim + d, view.stride, chunk.count, depth,
                                        state.output + d, dim);
        };
        int d = 0;
        for (; d + WIDE <= dim; d += WIDE) weigh(d, std::integral_constant<int, WIDE / LANES>{});
        if (d + NARROW <= dim) weigh(d, std::integral_constant<int, 2>{}), d += NARROW;
        if (d < dim) weigh(d, std::integral_constant<int, 1>{});
    }
}

// In vectors, for at most MOST queries, with an instance for each number.
template <int MOST, class T>
INLINE void attend_unpacked(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view,
                            const Chunk& chunk, const SoftmaxState* states) {
    if constexpr (MOST > 1)
        if (queries.count < MOST) return attend_unpacked<MOST - 1>(scratch, queries, view, chunk, states);
    attend_in_vectors<MOST>(scratch, queries, view, chunk, states);
}

template <class T>
INLINE void attend_few(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view,
                       const Chunk& chunk, const SoftmaxState* states) {
    if constexpr (!HAS_TILES<T>) {
        if (queries.count <= FEW) return attend_unpacked<FEW>(scratch, queries, view, chunk, states);
        if constexpr (MOST_IN_VECTORS > FEW)
            if (queries.count <= MOST_IN_VECTORS)
                return attend_in_vectors<MOST_IN_VECTORS>(scratch, queries, view, chunk, states);
    }
    attend_packed(scratch, queries, view, chunk, states);
}
