// A Llama's forward pass in one parallel region: see models/llama.py for the same in torch, operator by operator.
//
// Residuals are float32; what is multiplied is the model's number format, or int8 with one scale per row. Rotary
// embedding happens where queries and keys leave their product, and keys and values go from there into their slots.
// Every function below that takes a Team is run by all of its threads.

#include <omp.h>

#include "attention.h"
#include "team.h"

extern "C" {

struct Layer {
    Matrix qkv, out, gate_up, down;  // gate_up: panels of gate and up take turns
    const float* input_norm;         // both [hidden, padded to 16 with zeros]
    const float* post_norm;
};

struct Model {
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
    double eps;
    const Layer* layers;
    const float* final_norm;
    const void* embedding;  // [vocab, hidden], or null: the head's columns are the embedding
    const float* rope;      // [positions][head_dim]: cosines of half a head, then sines
    Matrix head;
};

struct Batch {
    int64_t num_rows, num_tokens;
    const int64_t* input_ids;
    const int32_t* row_offsets;    // [num_rows + 1]
    const int32_t* slots;          // [num_rows]
    const int32_t* cache_lengths;  // [num_rows]: tokens in the slot before this pass
    void* blocks;
    int64_t slot_stride, value_offset, layer_stride, token_stride;  // in elements
};
}

namespace {

constexpr int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int ROWS_AT_ONCE = 32;
constexpr int UNIT_PANELS = 4;  // what a thread takes at a time: 64 columns
constexpr int MOST_HEAD_DIM = 256;
constexpr int64_t CACHE_BYTES = 1 << 20;  // of a thread's own cache, what rows may take while weights pass by

// Cuts one piece of memory into arrays that start at a cache line.
struct Arena {
    char* base;
    int64_t used = 0;

    template <class T> T* take(int64_t count) {
        T* start = reinterpret_cast<T*>(base + used);
        used += pad(count * int64_t(sizeof(T)), 64);
        return start;
    }
};

// ---- rows ----

// What a product multiplies: the number format of the weights W decides.
template <class W> struct Rows {
    W* values;
    float* scales;  // one per row, int8 only
    int64_t stride;

    Rows(Arena& arena, int64_t count, int64_t width) : scales(nullptr), stride(pad(width, 64)) {
        values = arena.take<W>(count * stride);
        if (sizeof(W) == 1) scales = arena.take<float>(count);
    }

    // What lies between the width and the stride meets weights of zero, but must be a number.
    void clear_padding(int64_t row, int64_t width) const {
        std::memset((void*)(values + row * stride + width), 0, (stride - width) * sizeof(W));
    }
};

template <class W> INLINE void store_row(const Rows<W>& rows, int64_t row, int64_t k, f32x16 x, float) {
    store16(rows.values + row * rows.stride + k, x);
}

INLINE void store_row(const Rows<int8_t>& rows, int64_t row, int64_t k, f32x16 x, float inverse_scale) {
    i32x16 whole = __builtin_convertvector((x * inverse_scale + 12582912.0f) - 12582912.0f, i32x16);
    store_raw(rows.values + row * rows.stride + k, __builtin_convertvector(whole, i8x16));
}

// Symmetric, one scale per row: the largest magnitude becomes 127.
template <class W> INLINE float choose_scale(const Rows<W>& rows, int64_t row, float largest) {
    if (sizeof(W) != 1) return 1;
    rows.scales[row] = largest / 127;
    return largest > 0 ? 127 / largest : 0;
}

// x / sqrt(mean(x^2) + eps) * weight -> a row of the next product.
template <class W>
void normalize(const float* x, const float* weight, int64_t width, float eps, const Rows<W>& rows, int64_t row) {
    const int64_t padded = pad(width, LANES);
    f32x16 squares{}, largest{};
    for (int64_t k = 0; k < padded; k += LANES) {
        f32x16 v = load16(x + k);
        squares += v * v;
        if (sizeof(W) == 1) largest = max16(abs16(v * load16(weight + k)), largest);
    }
    const float scale = 1 / __builtin_sqrtf(sum16(squares) / width + eps);
    const float inverse = choose_scale(rows, row, max_of16(largest) * scale);
    for (int64_t k = 0; k < padded; k += LANES)
        store_row(rows, row, k, load16(x + k) * scale * load16(weight + k), inverse);
    rows.clear_padding(row, padded);
}

// Rows of the model's format as rows of the next product; `padded` elements of each are numbers.
template <class T, class W> void convert_row(const T* from, int64_t padded, const Rows<W>& rows, int64_t row) {
    f32x16 largest{};
    if (sizeof(W) == 1)
        for (int64_t k = 0; k < padded; k += LANES) largest = max16(abs16(load16(from + k)), largest);
    const float inverse = choose_scale(rows, row, max_of16(largest));
    for (int64_t k = 0; k < padded; k += LANES) store_row(rows, row, k, load16(from + k), inverse);
    rows.clear_padding(row, padded);
}

// ---- products ----

// x W^T + b of all rows, unit by unit: `use(column, row, count, c, stride)` gets float32 tiles of the result.
template <class W, class Use>
void linear(Team& team, const Matrix& matrix, const Rows<W>& x, int64_t num_rows, int unit_panels, Use use) {
    const int64_t depth = matrix.depth, panels = pad(matrix.columns, LANES) / LANES;
    const int64_t units = (panels + unit_panels - 1) / unit_panels;
    const int64_t fitting = pad(CACHE_BYTES / (depth * int64_t(sizeof(W))), ROWS_AT_ONCE);
    const int64_t block_rows = num_rows < fitting ? num_rows : fitting;
    const int64_t blocks = (num_rows + block_rows - 1) / block_rows;
    const int stride = unit_panels * LANES;
    team.share(blocks * units, [&](int64_t task) {
        alignas(64) float c[ROWS_AT_ONCE * MOST_HEAD_DIM];
        const int64_t unit = task % units, start = task / units * block_rows;
        const int64_t end = start + block_rows < num_rows ? start + block_rows : num_rows;
        const int64_t column = unit * stride;
        const int width = unit_panels < panels - unit * unit_panels ? unit_panels : int(panels - unit * unit_panels);
        const W* weights = static_cast<const W*>(matrix.panels) + column * depth;
        const int64_t steps = (end - start + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        const int64_t slice = pad(stride * depth * int64_t(sizeof(W)) / steps, 64);
        const char* next = reinterpret_cast<const char*>(weights + stride * depth);
        for (int64_t row = start; row < end; row += ROWS_AT_ONCE) {
            const int count = end - row < ROWS_AT_ONCE ? int(end - row) : ROWS_AT_ONCE;
            if (steps > 1)  // fetch the next unit's weights while this one's are multiplied
                for (int64_t i = 0; i < slice; i += 64) __builtin_prefetch(next + i, 0, 2);
            next += slice;
            multiply<W>(x.values + row * x.stride, x.stride, count, weights, width, depth,
                        matrix.sums ? matrix.sums + column : nullptr, c, stride, row == start);
            for (int p = 0; p < width * LANES; p += LANES)
                for (int r = 0; r < count; r++) {
                    f32x16 value = load16(c + r * stride + p);
                    if (sizeof(W) == 1) value *= x.scales[row + r] * load16(matrix.scales + column + p);
                    if (matrix.bias) value += load16(matrix.bias + column + p);
                    if (sizeof(W) == 1 || matrix.bias) store16(c + r * stride + p, value);
                }
            use(column, row, count, c, stride, width * LANES);
        }
    });
}

// ---- the forward pass ----

struct Token {
    int32_t position;
    int64_t slot;  // offset of the slot in the blocks
};

// Some queries of one row and some heads, and some chunks of their keys.
struct Task {
    int32_t row, head, num_heads, first_query, num_queries, first_chunk, num_chunks;
    int32_t group;  // several tasks share the chunks of these queries; -1: this one has them all
};

template <class T, class W> struct Forward {
    const Model& model;
    const Batch& batch;
    const int64_t heads_per_group, num_tokens;
    float* x;  // residuals [T][stride]
    int64_t x_stride;
    Rows<W> normed, projected, activated;
    T* queries;   // [kv head][T * heads of its group][head_dim], scaled for exp2
    T* attended;  // where W is int8: before quantisation
    T* gated;     // likewise
    int64_t attended_stride, gated_stride;
    Token* tokens;
    Task* tasks;
    int64_t num_tasks = 0;
    bool is_dry_run = false;
    float* partials;  // [group][chunk][head]: only of groups whose chunks several tasks share
    int64_t most_chunks = 0, num_groups = 0;
    std::atomic<int32_t>* chunks_done;  // [group]
    Counter* counters;
    char* scratch;  // per thread
    int64_t scratch_bytes;
    int num_threads;

    static constexpr int64_t STAGES_PER_LAYER = 12;
    static constexpr int64_t OTHER_STAGES = 8;

    int64_t num_counters() const { return (OTHER_STAGES + STAGES_PER_LAYER * model.num_layers) * num_threads; }

    Forward(const Model& m, const Batch& b, Arena& arena, int threads)
        : model(m), batch(b), heads_per_group(m.num_heads / m.num_kv_heads), num_tokens(b.num_tokens),
          normed(arena, b.num_tokens, m.hidden), projected(arena, b.num_tokens, m.num_heads * m.head_dim),
          activated(arena, b.num_tokens, m.intermediate), num_threads(threads) {
        x_stride = pad(m.hidden, LANES);
        x = arena.take<float>(num_tokens * x_stride);
        queries = arena.take<T>(num_tokens * m.num_heads * m.head_dim);
        attended_stride = projected.stride, gated_stride = activated.stride;
        if constexpr (sizeof(W) == 1) {
            attended = arena.take<T>(num_tokens * attended_stride);
            gated = arena.take<T>(num_tokens * gated_stride);
        } else {
            attended = projected.values;
            gated = activated.values;
        }
        tokens = arena.take<Token>(num_tokens);
        plan_tasks(arena);
        partials = arena.take<float>(num_groups * most_chunks * MOST_HEADS * partial_floats());
        chunks_done = arena.take<std::atomic<int32_t>>(num_groups);
        counters = arena.take<Counter>(num_counters());
        scratch_bytes = take_scratch(nullptr);
        scratch = arena.take<char>(scratch_bytes * threads);
    }

    int64_t partial_floats() const { return Partial::floats(LANES, model.head_dim); }

    int32_t length_after(int64_t row) const {
        return batch.cache_lengths[row] + batch.row_offsets[row + 1] - batch.row_offsets[row];
    }

    // ---- before the threads start ----

    // A row of few queries is one task for all its heads (or MOST_HEADS of them). Where that does not make enough
    // tasks for the threads, several share the chunks of a row's keys.
    void plan_tasks(Arena& arena) {
        const int64_t heads = model.num_kv_heads, head_blocks = (heads + MOST_HEADS - 1) / MOST_HEADS;
        int64_t num_small = 0, num_large = 0;
        for (int64_t row = 0; row < batch.num_rows; row++) {
            if (queries_of(row) <= LANES)
                num_small += head_blocks;
            else
                num_large += heads * ((queries_of(row) + MOST_QUERIES - 1) / MOST_QUERIES);
        }
        constexpr int64_t TASKS_PER_THREAD = 4;
        const int64_t shares = num_small ? (TASKS_PER_THREAD * num_threads - 1) / (num_small + num_large) + 1 : 1;
        tasks = arena.take<Task>(num_small * shares + num_large);
        is_dry_run = arena.base == nullptr;
        for (int32_t row = 0; row < batch.num_rows; row++) {
            const int32_t chunks = (length_after(row) + CHUNK - 1) / CHUNK;
            if (chunks > most_chunks) most_chunks = chunks;
            if (queries_of(row) <= LANES)
                plan_small(row, chunks, int32_t(shares < chunks ? shares : chunks));
            else
                plan_large(row, chunks);
        }
    }

    int32_t queries_of(int64_t row) const {
        return int32_t((batch.row_offsets[row + 1] - batch.row_offsets[row]) * heads_per_group);
    }

    void plan_small(int32_t row, int32_t chunks, int32_t shares) {
        const int32_t heads = int32_t(model.num_kv_heads);
        for (int32_t head = 0; head < heads; head += MOST_HEADS) {
            const int32_t group = shares > 1 ? int32_t(num_groups++) : -1;
            const int32_t num_heads = heads - head < MOST_HEADS ? heads - head : MOST_HEADS;
            for (int32_t s = 0; s < shares; s++) {
                const int32_t chunk = chunks * s / shares, end = chunks * (s + 1) / shares;
                add_task({row, head, num_heads, 0, queries_of(row), chunk, end - chunk, group});
            }
        }
    }

    void plan_large(int32_t row, int32_t chunks) {
        const int32_t count = queries_of(row);
        for (int32_t head = 0; head < model.num_kv_heads; head++)
            for (int32_t first = 0; first < count; first += MOST_QUERIES)
                add_task({row, head, 1, first, count - first < MOST_QUERIES ? count - first : MOST_QUERIES, 0, chunks, -1});
    }

    void add_task(const Task& task) {
        if (!is_dry_run) tasks[num_tasks] = task;
        num_tasks++;
    }

    int64_t take_scratch(AttentionScratch<T>* into, char* base = nullptr) const {
        Arena arena{base};
        AttentionScratch<T> s;
        const int64_t dim = model.head_dim, heads = model.num_kv_heads < MOST_HEADS ? model.num_kv_heads : MOST_HEADS;
        const int64_t most = heads * LANES > MOST_QUERIES ? heads * LANES : MOST_QUERIES;
        s.queries = arena.take<T>(most * dim);
        s.values = arena.take<T>(CHUNK * heads * dim);
        s.weights = arena.take<T>(most * CHUNK);
        s.scores = arena.take<float>(heads * CHUNK * LANES);
        for (int head = 0; head < heads; head++) {
            const int64_t queries = head ? LANES : MOST_QUERIES;
            s.chunk[head] = Partial::at(arena.take<float>(Partial::floats(queries, dim)), queries);
            s.merged[head] = Partial::at(arena.take<float>(Partial::floats(queries, dim)), queries);
        }
        if (into) *into = s;
        return arena.used;
    }

    void prepare() {
        std::memset((void*)counters, 0, sizeof(Counter) * num_counters());
        for (int64_t group = 0; group < num_groups; group++) chunks_done[group] = 0;
        for (int64_t row = 0; row < batch.num_rows; row++)
            for (int32_t t = batch.row_offsets[row], i = 0; t < batch.row_offsets[row + 1]; t++, i++)
                tokens[t] = {batch.cache_lengths[row] + i, batch.slots[row] * batch.slot_stride};
    }

    // ---- the stages ----

    void embed(int64_t t) const {
        const int64_t token = batch.input_ids[t], hidden = model.hidden;
        float* to = x + t * x_stride;
        if (model.embedding) {
            const T* from = static_cast<const T*>(model.embedding) + token * hidden;
            for (int64_t k = 0; k < hidden; k++) to[k] = to_float(from[k]);
        } else {
            constexpr int64_t PACK = Pack<W>;
            const W* from = static_cast<const W*>(model.head.panels) + token / LANES * LANES * model.head.depth +
                            token % LANES * PACK;
            for (int64_t k = 0; k < hidden; k++) {
                const W value = from[k / PACK * LANES * PACK + k % PACK];
                if constexpr (sizeof(W) == 1)
                    to[k] = value * model.head.scales[token];
                else
                    to[k] = to_float(value);
            }
        }
        for (int64_t k = hidden; k < x_stride; k++) to[k] = 0;
        if constexpr (sizeof(W) != 1) {
            projected.clear_padding(t, model.num_heads * model.head_dim);
            activated.clear_padding(t, pad(model.intermediate, LANES));
        }
    }

    // One head of some tokens, fresh from its product: rotated if it is a query or a key, and brought to its place.
    void place_head(int64_t layer, int64_t head, int64_t first, int count, const float* c, int stride) const {
        const int64_t dim = model.head_dim, num_keys = model.num_kv_heads;
        const float query_scale = LOG2_E / __builtin_sqrtf(float(dim));
        T* cache = static_cast<T*>(batch.blocks) + layer * batch.layer_stride;
        for (int i = 0; i < count; i++, c += stride) {
            const int64_t t = first + i;
            const Token token = tokens[t];
            T* slot = cache + token.slot + token.position * batch.token_stride;
            if (head < model.num_heads) {
                const int64_t group = head / heads_per_group, member = head % heads_per_group;
                T* to = queries + ((group * num_tokens + t) * heads_per_group + member) * dim;
                rotate(c, token.position, query_scale, to);
            } else if (head < model.num_heads + num_keys) {
                rotate(c, token.position, 1.0f, slot + (head - model.num_heads) * dim);
            } else {
                T* to = slot + batch.value_offset + (head - model.num_heads - num_keys) * dim;
                for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(c + d));
            }
        }
    }

    void rotate(const float* c, int64_t position, float scale, T* to) const {
        const int64_t half = model.head_dim / 2;
        const float *cosines = model.rope + position * model.head_dim, *sines = cosines + half;
        for (int64_t d = 0; d < half; d += LANES) {
            f32x16 low = load16(c + d), high = load16(c + half + d);
            f32x16 cosine = load16(cosines + d) * scale, sine = load16(sines + d) * scale;
            store16(to + d, low * cosine - high * sine);
            store16(to + half + d, high * cosine + low * sine);
        }
    }

    void attend(int64_t layer, const Task& task, const AttentionScratch<T>& scratch) const {
        const int64_t dim = model.head_dim, first_token = batch.row_offsets[task.row];
        const int width = int(pad(task.num_queries, LANES));
        int32_t limits[MOST_QUERIES];
        for (int q = 0; q < MOST_QUERIES; q++)
            limits[q] = q < task.num_queries
                            ? batch.cache_lengths[task.row] + int32_t((task.first_query + q) / heads_per_group) + 1
                            : INT32_MAX;
        for (int i = 0; i < task.num_heads; i++) {
            const int64_t first = ((task.head + i) * num_tokens + first_token) * heads_per_group + task.first_query;
            pack_queries(queries + first * dim, task.num_queries, int(dim), scratch.queries + i * width * dim);
            if (task.group < 0) start_merging(scratch.merged[i], task.num_queries, int(dim));
        }
        const T* keys = static_cast<const T*>(batch.blocks) + layer * batch.layer_stride +
                        batch.slots[task.row] * batch.slot_stride + task.head * dim;
        const View<T> view{keys,           keys + batch.value_offset, batch.token_stride,
                           task.num_heads, int(dim),                  task.num_queries,
                           limits};
        const int end = limits[task.num_queries - 1];
        for (int chunk = task.first_chunk; chunk < task.first_chunk + task.num_chunks; chunk++) {
            const int first = chunk * CHUNK, n = end - first < CHUNK ? end - first : CHUNK;
            if (n <= 0) break;
            if (task.group < 0) {
                attend_chunk(scratch, view, first, n, scratch.chunk);
                for (int i = 0; i < task.num_heads; i++)
                    merge(scratch.merged[i], scratch.chunk[i], task.num_queries, int(dim));
            } else {
                Partial results[MOST_HEADS];
                for (int i = 0; i < task.num_heads; i++) results[i] = partial(task.group, chunk, i);
                attend_chunk(scratch, view, first, n, results);
            }
        }
        if (task.group >= 0 && !merge_group(task, (end + CHUNK - 1) / CHUNK, scratch)) return;
        for (int i = 0; i < task.num_heads; i++) finish(task, task.head + i, first_token, scratch.merged[i]);
    }

    Partial partial(int64_t group, int64_t chunk, int64_t head) const {
        return Partial::at(partials + ((group * most_chunks + chunk) * MOST_HEADS + head) * partial_floats(), LANES);
    }

    // Who does the last of a group's chunks merges them all. False for the others.
    bool merge_group(const Task& task, int num_chunks, const AttentionScratch<T>& scratch) const {
        const int done = chunks_done[task.group].fetch_add(task.num_chunks, std::memory_order_acq_rel) + task.num_chunks;
        if (done < num_chunks) return false;
        chunks_done[task.group].store(0, std::memory_order_relaxed);  // for the next layer
        for (int i = 0; i < task.num_heads; i++) {
            start_merging(scratch.merged[i], task.num_queries, int(model.head_dim));
            for (int chunk = 0; chunk < num_chunks; chunk++)
                merge(scratch.merged[i], partial(task.group, chunk, i), task.num_queries, int(model.head_dim));
        }
        return true;
    }

    void finish(const Task& task, int64_t kv_head, int64_t first_token, const Partial& merged) const {
        const int64_t dim = model.head_dim;
        for (int q = 0; q < task.num_queries; q++) {
            const int64_t index = task.first_query + q;
            const int64_t t = first_token + index / heads_per_group;
            const int64_t head = kv_head * heads_per_group + index % heads_per_group;
            T* to = attended + t * attended_stride + head * dim;
            const float share = 1 / merged.sum[q];
            for (int64_t d = 0; d < dim; d += 2 * LANES) {
                f32x16 low = load16(merged.output + q * dim + d), high = load16(merged.output + q * dim + d + LANES);
                restore_order(T{}, low, high);
                store32(to + d, low * share, high * share);
            }
        }
    }

    void run_layer(Team& team, int64_t index, const AttentionScratch<T>& scratch) const {
        const Layer& layer = model.layers[index];
        const auto add_to_residual = [&](int64_t column, int64_t row, int count, const float* c, int stride, int width) {
            for (int r = 0; r < count; r++)
                for (int k = 0; k < width; k += LANES) {
                    float* to = x + (row + r) * x_stride + column + k;
                    store16(to, load16(to) + load16(c + r * stride + k));
                }
        };
        normalize_all(team, layer.input_norm);
        linear(team, layer.qkv, normed, num_tokens, int(model.head_dim / LANES),
               [&](int64_t column, int64_t row, int count, const float* c, int stride, int) {
                   place_head(index, column / model.head_dim, row, count, c, stride);
               });
        team.wait();
        team.share(num_tasks, [&](int64_t i) { attend(index, tasks[i], scratch); });
        team.wait();
        convert_all(team, attended, attended_stride, model.num_heads * model.head_dim, projected);
        linear(team, layer.out, projected, num_tokens, UNIT_PANELS, add_to_residual);
        team.wait();
        normalize_all(team, layer.post_norm);
        linear(team, layer.gate_up, normed, num_tokens, UNIT_PANELS,
               [&](int64_t column, int64_t row, int count, const float* c, int stride, int width) {
                   for (int r = 0; r < count; r++, c += stride) {
                       T* to = gated + (row + r) * gated_stride + column / 2;
                       for (int k = 0; k < width; k += 2 * LANES)
                           store16(to + k / 2, silu16(load16(c + k)) * load16(c + k + LANES));
                   }
               });
        team.wait();
        convert_all(team, gated, gated_stride, pad(model.intermediate, LANES), activated);
        linear(team, layer.down, activated, num_tokens, UNIT_PANELS, add_to_residual);
        team.wait();
    }

    void normalize_all(Team& team, const float* weight) const {
        team.share_rows(num_tokens, [&](int64_t t) {
            normalize(x + t * x_stride, weight, model.hidden, float(model.eps), normed, t);
        });
        team.wait();
    }

    void convert_all(Team& team, const T* from, int64_t stride, int64_t width, const Rows<W>& to) const {
        if (sizeof(W) != 1) return;
        team.share_rows(num_tokens, [&](int64_t t) { convert_row(from + t * stride, width, to, t); });
        team.wait();
    }

    // -> final hidden states [T][hidden]
    void run(Team team, T* hidden) const {
        AttentionScratch<T> own;
        take_scratch(&own, scratch + team.rank * scratch_bytes);
        team.share_rows(num_tokens, [&](int64_t t) { embed(t); });
        team.wait();
        for (int64_t layer = 0; layer < model.num_layers; layer++) run_layer(team, layer, own);
        team.share_rows(num_tokens, [&](int64_t t) {
            const float *from = x + t * x_stride, *weight = model.final_norm;
            f32x16 squares{};
            for (int64_t k = 0; k < x_stride; k += LANES) squares += load16(from + k) * load16(from + k);
            const float scale = 1 / __builtin_sqrtf(sum16(squares) / model.hidden + float(model.eps));
            for (int64_t k = 0; k < model.hidden; k++) store1(hidden + t * model.hidden + k, from[k] * scale * weight[k]);
        });
    }
};

// Runs `body(team)` on that many threads of the pool that torch has as well.
template <class Body> void in_parallel(int num_threads, Counter* counters, Body body) {
    Barrier barrier;
#pragma omp parallel num_threads(num_threads)
    {
        forget_tiles();
        body(Team{omp_get_thread_num(), omp_get_num_threads(), counters, barrier});
        leave_tiles();
    }
}

template <class T, class W>
int64_t forward(const Model& model, const Batch& batch, void* hidden, void* workspace, int num_threads) {
    Arena arena{static_cast<char*>(workspace)};
    Forward<T, W> pass(model, batch, arena, num_threads);
    if (workspace) {
        for (int64_t t = 0; t < batch.num_tokens; t++)
            if (batch.input_ids[t] < 0 || batch.input_ids[t] >= model.vocab) return -1;
        pass.prepare();
        in_parallel(num_threads, pass.counters, [&](Team team) { pass.run(team, static_cast<T*>(hidden)); });
    }
    return arena.used;
}

template <class T, class W>
int64_t logits(const Model& model, const void* hidden, int64_t num_rows, float* out, void* workspace, int num_threads) {
    Arena arena{static_cast<char*>(workspace)};
    Rows<W> rows(arena, num_rows, model.hidden);
    const int64_t padded = pad(model.hidden, LANES);
    T* own = arena.take<T>(num_rows * padded);
    Counter* counters = arena.take<Counter>(4 * num_threads);
    if (!workspace) return arena.used;
    std::memset((void*)counters, 0, sizeof(Counter) * 4 * num_threads);
    in_parallel(num_threads, counters, [&](Team team) {
        team.share_rows(num_rows, [&](int64_t row) {
            std::memset((void*)(own + row * padded), 0, padded * sizeof(T));
            std::memcpy((void*)(own + row * padded), static_cast<const T*>(hidden) + row * model.hidden,
                        model.hidden * sizeof(T));
            convert_row(own + row * padded, padded, rows, row);
        });
        team.wait();
        linear(team, model.head, rows, num_rows, UNIT_PANELS,
               [&](int64_t column, int64_t row, int count, const float* c, int stride, int width) {
                   const int64_t left = model.vocab - column;
                   const int64_t n = width < left ? width : left;
                   for (int r = 0; r < count; r++)
                       std::memcpy(out + (row + r) * model.vocab + column, c + r * stride, n * sizeof(float));
               });
    });
    return arena.used;
}

}  // namespace

// The number formats of model and weights: 0 float32, 1 bfloat16, 2 float32 with int8 weights, 3 bfloat16 likewise.
#define CHAIRLIFT_FOR_FORMAT(format, function, ...)                            \
    switch (format) {                                                          \
        case 0: return function<float, float>(__VA_ARGS__);                    \
        case 1: return function<bf16, bf16>(__VA_ARGS__);                      \
        case 2: return function<float, int8_t>(__VA_ARGS__);                   \
        default: return function<bf16, int8_t>(__VA_ARGS__);                   \
    }

extern "C" {

// 0 if this machine lets the library run.
int chairlift_start() { return enable_tiles() ? 0 : 1; }

// Both return the bytes of workspace they need, and compute only if there is one; -1 if a token is not in the vocabulary.
int64_t chairlift_forward(const Model* model, const Batch* batch, int format, void* hidden, void* workspace,
                          int num_threads) {
    CHAIRLIFT_FOR_FORMAT(format, forward, *model, *batch, hidden, workspace, num_threads)
}

int64_t chairlift_logits(const Model* model, const void* hidden, int64_t num_rows, int format, float* out,
                         void* workspace, int num_threads) {
    CHAIRLIFT_FOR_FORMAT(format, logits, *model, hidden, num_rows, out, workspace, num_threads)
}
}
