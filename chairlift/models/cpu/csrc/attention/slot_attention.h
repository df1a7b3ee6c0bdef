// Attention of a batch over its slots: the work of a thread on a task.
#pragma once

#include <atomic>

#include "tasks.h"

// Chunks of a sequence, by number: chunk i begins with key i * CHUNK.
struct Chunks {
    int begin, end;

    Chunks share(const Task& task) const {
        const int count = end - begin;
        return {begin + count * task.share / task.num_shares, begin + count * (task.share + 1) / task.num_shares};
    }
};

template <class T> struct SlotAttention {
    const Model& model;
    const Batch& batch;
    const TaskList tasks;
    const int64_t num_tokens;
    T* queries;   // [kv head][tokens * query heads][head_dim], scaled for exp2
    T* attended;  // [tokens][stride]
    int64_t attended_stride;

    SlotAttention(const Model& m, const Batch& b, int num_threads, Arena& arena, T* output, int64_t stride)
        : model(m), batch(b), tasks(m, b, num_threads, arena), num_tokens(b.num_tokens), attended(output),
          attended_stride(stride) {
        queries = arena.allocate<T>(num_tokens * m.num_heads * m.head_dim);
        states = arena.allocate<float>(tasks.num_states * state_floats());
        shares_done = arena.allocate<std::atomic<int32_t>>(tasks.num_splits);
        scratch_bytes = allocate_scratch(nullptr);
        scratch = arena.allocate<char>(scratch_bytes * num_threads);
    }

    void prepare() const {
        for (int64_t split = 0; split < tasks.num_splits; split++) shares_done[split] = 0;
    }

    AttentionScratch<T> scratch_of(int rank) const {
        AttentionScratch<T> own;
        allocate_scratch(&own, scratch + rank * scratch_bytes);
        return own;
    }

    void attend(int64_t layer, const Task& task, const AttentionScratch<T>& scratch) const {
        const int64_t dim = model.head_dim, first_token = batch.row_offsets[task.row];
        int32_t limits[MOST_QUERIES];
        for (int q = 0; q < pad(task.num_queries, LANES); q++)
            limits[q] = q < task.num_queries ? batch.cache_lengths[task.row] + 1 +
                                                   int32_t((task.first_query + q) / tasks.heads_per_kv_head)
                                             : INT32_MAX;
        const Queries<T> own = queries_of(layer, task, limits);
        for (int i = 0; i < task.num_heads; i++) {
            if (task.num_queries <= FEW)
                pack_columns(own.data + i * own.head_stride, dim, task.num_queries, LANES, int(dim),
                             scratch.queries + i * LANES * dim);
            if (task.split < 0) start_merging(scratch.merged[i], task.num_queries, int(dim));
        }
        // All rows read a common prefix from one slot, so that it stays in the caches from row to row.
        const int num_common = batch.common_slots ? batch.common_lengths[task.row] : 0;
        const KvView<T> slot = view_of(layer, task, batch.slots[task.row]);
        const KvView<T> common = num_common ? view_of(layer, task, batch.common_slots[task.row]) : slot;
        const int start = own.mask.start(0) > 0 ? own.mask.start(0) / KEYS_PADDING * KEYS_PADDING : 0;
        const int end = limits[task.num_queries - 1];
        const Chunks chunks{start / CHUNK, (end + CHUNK - 1) / CHUNK}, share = chunks.share(task);
        for (int number = share.begin; number < share.end; number++) {
            const int first = number * CHUNK > start ? number * CHUNK : start, behind = (number + 1) * CHUNK;
            const Chunk chunk{first, (behind < end ? behind : end) - first};
            const KvView<T>& view = behind <= num_common ? common : slot;
            if (task.split < 0) {
                attend_chunk<T>(scratch, own, view, chunk, nullptr);
            } else {
                SoftmaxState results[MOST_HEADS];
                for (int i = 0; i < task.num_heads; i++) results[i] = state(task, number, i);
                attend_chunk(scratch, own, view, chunk, results);
            }
        }
        if (task.split >= 0 && !merge_split(task, chunks, scratch)) return;
        for (int i = 0; i < task.num_heads; i++) finish(task, task.head + i, first_token, scratch.merged[i]);
    }

  private:
    float* states;                      // by split: [chunk][head]
    std::atomic<int32_t>* shares_done;  // [split]
    char* scratch;                      // per thread
    int64_t scratch_bytes;

    int64_t state_floats() const { return SoftmaxState::floats(LANES, model.head_dim); }

    Queries<T> queries_of(int64_t layer, const Task& task, const int32_t* limits) const {
        const int64_t head_stride = num_tokens * tasks.heads_per_kv_head * model.head_dim;
        const int64_t first = batch.row_offsets[task.row] * tasks.heads_per_kv_head + task.first_query;
        const T* data = queries + task.head * head_stride + first * model.head_dim;
        const Mask mask{limits, int(model.layers[layer].window)};
        return {data, task.num_queries, head_stride, mask, float(model.attention_softcap * LOG2_E)};
    }

    KvView<T> view_of(int64_t layer, const Task& task, int64_t slot) const {
        const T* keys = static_cast<const T*>(batch.blocks) + layer * batch.layer_stride + slot * batch.slot_stride +
                        task.head * model.head_dim;
        return {keys, keys + batch.value_offset, batch.token_stride, task.num_heads, int(model.head_dim)};
    }

    int64_t allocate_scratch(AttentionScratch<T>* into, char* base = nullptr) const {
        Arena arena{base};
        AttentionScratch<T> s;
        const int64_t dim = model.head_dim, heads = model.num_kv_heads < MOST_HEADS ? model.num_kv_heads : MOST_HEADS;
        const int64_t rows = heads * LANES > QUERIES_AT_ONCE ? heads * LANES : QUERIES_AT_ONCE;
        s.queries = arena.allocate<T>(heads * LANES * dim);
        s.keys = arena.allocate<T>(CHUNK * dim);
        s.values = arena.allocate<T>(CHUNK * heads * dim);
        s.weights = arena.allocate<T>(rows * CHUNK);
        s.scores = arena.allocate<float>(rows * CHUNK);
        const auto allocate_state = [&](int64_t queries) {
            return SoftmaxState::at(arena.allocate<float>(SoftmaxState::floats(queries, dim)), queries);
        };
        for (int head = 0; head < heads; head++) {
            s.chunk[head] = allocate_state(QUERIES_AT_ONCE);
            s.merged[head] = allocate_state(head ? LANES : MOST_QUERIES);
        }
        if (into) *into = s;
        return arena.used;
    }

    SoftmaxState state(const Task& task, int64_t chunk, int64_t head) const {
        const int64_t index = task.first_state + chunk * task.num_heads + head;
        return SoftmaxState::at(states + index * state_floats(), LANES);
    }

    // The thread that finishes a split's last share merges all chunks. False for other threads.
    bool merge_split(const Task& task, const Chunks& chunks, const AttentionScratch<T>& scratch) const {
        if (shares_done[task.split].fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_shares) return false;
        shares_done[task.split].store(0, std::memory_order_relaxed);  // for the next layer
        for (int i = 0; i < task.num_heads; i++) {
            start_merging(scratch.merged[i], task.num_queries, int(model.head_dim));
            for (int chunk = chunks.begin; chunk < chunks.end; chunk++)
                merge(scratch.merged[i], state(task, chunk, i), task.num_queries, int(model.head_dim));
        }
        return true;
    }

    void finish(const Task& task, int64_t kv_head, int64_t first_token, const SoftmaxState& merged) const {
        const int64_t dim = model.head_dim;
        for (int q = 0; q < task.num_queries; q++) {
            const int64_t index = task.first_query + q;
            const int64_t t = first_token + index / tasks.heads_per_kv_head;
            const int64_t head = kv_head * tasks.heads_per_kv_head + index % tasks.heads_per_kv_head;
            T* to = attended + t * attended_stride + head * dim;
            const float factor = 1 / merged.sum[q];
            for (int64_t d = 0; d < dim; d += 2 * LANES) {
                f32x16 low = load16(merged.output + q * dim + d), high = load16(merged.output + q * dim + d + LANES);
                restore_order(T{}, low, high);
                store32(to + d, low * factor, high * factor);
            }
        }
    }
};
