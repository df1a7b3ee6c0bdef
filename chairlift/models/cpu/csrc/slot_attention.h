// Attention of a batch over its slots: the work of a thread on a task.
#pragma once

#include <atomic>

#include "tasks.h"

// Chunks of a sequence, by number.
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
    T* queries;   // [kv head][tokens * heads of its group][head_dim], scaled for exp2
    T* attended;  // [tokens][stride]
    int64_t attended_stride;

    SlotAttention(const Model& m, const Batch& b, int num_threads, Arena& arena, T* output, int64_t stride)
        : model(m), batch(b), tasks(m, b, num_threads, arena), num_tokens(b.num_tokens), attended(output),
          attended_stride(stride) {
        queries = arena.take<T>(num_tokens * m.num_heads * m.head_dim);
        partials = arena.take<float>(tasks.num_partials * partial_floats());
        shares_done = arena.take<std::atomic<int32_t>>(tasks.num_groups);
        scratch_bytes = take_scratch(nullptr);
        scratch = arena.take<char>(scratch_bytes * num_threads);
    }

    void prepare() const {
        for (int64_t group = 0; group < tasks.num_groups; group++) shares_done[group] = 0;
    }

    AttentionScratch<T> scratch_of(int rank) const {
        AttentionScratch<T> own;
        take_scratch(&own, scratch + rank * scratch_bytes);
        return own;
    }

    void attend(int64_t layer, const Task& task, const AttentionScratch<T>& scratch) const {
        const int64_t dim = model.head_dim, first_token = batch.row_offsets[task.row];
        int32_t limits[MOST_QUERIES];
        const Sight sight{limits, int(model.layers[layer].window), float(model.attention_softcap * LOG2_E)};
        for (int q = 0; q < pad(task.num_queries, LANES); q++)
            limits[q] = q < task.num_queries
                            ? batch.cache_lengths[task.row] + int32_t((task.first_query + q) / tasks.group_size) + 1
                            : INT32_MAX;
        const int64_t head_stride = num_tokens * tasks.group_size * dim;
        const int64_t first_query = first_token * tasks.group_size + task.first_query;
        const T* own_queries = queries + task.head * head_stride + first_query * dim;
        for (int i = 0; i < task.num_heads; i++) {
            if (task.num_queries <= FEW)
                pack_columns(own_queries + i * head_stride, dim, task.num_queries, LANES, int(dim),
                             scratch.queries + i * LANES * dim);
            if (task.group < 0) start_merging(scratch.merged[i], task.num_queries, int(dim));
        }
        const auto view_of = [&](int64_t slot) {
            const T* keys = static_cast<const T*>(batch.blocks) + layer * batch.layer_stride +
                            slot * batch.slot_stride + task.head * dim;
            return View<T>{keys,           keys + batch.value_offset, batch.token_stride,
                           task.num_heads, int(dim),                  task.num_queries,
                           own_queries,    head_stride,               sight};
        };
        // All rows read a common prefix from one slot, so that it stays in the caches from row to row.
        const int num_common = batch.common_slots ? batch.common_lengths[task.row] : 0;
        const View<T> own = view_of(batch.slots[task.row]);
        const View<T> common = num_common ? view_of(batch.common_slots[task.row]) : own;
        const int start = sight.start(0) > 0 ? sight.start(0) / KEYS_PADDING * KEYS_PADDING : 0;
        const int end = limits[task.num_queries - 1];
        const Chunks chunks{start / CHUNK, (end + CHUNK - 1) / CHUNK}, share = chunks.share(task);
        for (int chunk = share.begin; chunk < share.end; chunk++) {
            const int first = chunk * CHUNK > start ? chunk * CHUNK : start;
            const int behind = (chunk + 1) * CHUNK, n = (behind < end ? behind : end) - first;
            const View<T>& view = behind <= num_common ? common : own;
            if (task.group < 0) {
                attend_chunk<T>(scratch, view, first, n, nullptr);
            } else {
                Partial results[MOST_HEADS];
                for (int i = 0; i < task.num_heads; i++) results[i] = partial(task, chunk, i);
                attend_chunk(scratch, view, first, n, results);
            }
        }
        if (task.group >= 0 && !merge_group(task, chunks, scratch)) return;
        for (int i = 0; i < task.num_heads; i++) finish(task, task.head + i, first_token, scratch.merged[i]);
    }

  private:
    float* partials;                    // by group: [chunk][head]
    std::atomic<int32_t>* shares_done;  // [group]
    char* scratch;                      // per thread
    int64_t scratch_bytes;

    int64_t partial_floats() const { return Partial::floats(LANES, model.head_dim); }

    int64_t take_scratch(AttentionScratch<T>* into, char* base = nullptr) const {
        Arena arena{base};
        AttentionScratch<T> s;
        const int64_t dim = model.head_dim, heads = model.num_kv_heads < MOST_HEADS ? model.num_kv_heads : MOST_HEADS;
        const int64_t rows = heads * LANES > QUERIES_AT_ONCE ? heads * LANES : QUERIES_AT_ONCE;
        s.queries = arena.take<T>(heads * LANES * dim);
        s.keys = arena.take<T>(CHUNK * dim);
        s.values = arena.take<T>(CHUNK * heads * dim);
        s.weights = arena.take<T>(rows * CHUNK);
        s.scores = arena.take<float>(rows * CHUNK);
        const auto take_partial = [&](int64_t queries) {
            return Partial::at(arena.take<float>(Partial::floats(queries, dim)), queries);
        };
        for (int head = 0; head < heads; head++) {
            s.chunk[head] = take_partial(QUERIES_AT_ONCE);
            s.merged[head] = take_partial(head ? LANES : MOST_QUERIES);
        }
        if (into) *into = s;
        return arena.used;
    }

    Partial partial(const Task& task, int64_t chunk, int64_t head) const {
        const int64_t index = task.first_partial + chunk * task.num_heads + head;
        return Partial::at(partials + index * partial_floats(), LANES);
    }

    // The thread that finishes a group's last share merges all chunks. False for other threads.
    bool merge_group(const Task& task, const Chunks& chunks, const AttentionScratch<T>& scratch) const {
        if (shares_done[task.group].fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_shares) return false;
        shares_done[task.group].store(0, std::memory_order_relaxed);  // for the next layer
        for (int i = 0; i < task.num_heads; i++) {
            start_merging(scratch.merged[i], task.num_queries, int(model.head_dim));
            for (int chunk = chunks.begin; chunk < chunks.end; chunk++)
                merge(scratch.merged[i], partial(task, chunk, i), task.num_queries, int(model.head_dim));
        }
        return true;
    }

    void finish(const Task& task, int64_t kv_head, int64_t first_token, const Partial& merged) const {
        const int64_t dim = model.head_dim;
        for (int q = 0; q < task.num_queries; q++) {
            const int64_t index = task.first_query + q;
            const int64_t t = first_token + index / tasks.group_size;
            const int64_t head = kv_head * tasks.group_size + index % tasks.group_size;
            T* to = attended + t * attended_stride + head * dim;
            const float share = 1 / merged.sum[q];
            for (int64_t d = 0; d < dim; d += 2 * LANES) {
                f32x16 low = load16(merged.output + q * dim + d), high = load16(merged.output + q * dim + d + LANES);
                restore_order(T{}, low, high);
                store32(to + d, low * share, high * share);
            }
        }
    }
};
