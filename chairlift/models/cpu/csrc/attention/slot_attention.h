// Attention of a block over the slots of a batch: the work of a thread on a task.
#pragma once

#include "../rows.h"
#include "memory.h"

// Chunks of a sequence, by number: chunk i begins with key i * CHUNK.
struct Chunks {
    int begin, end;

    Chunks share(const Task& task) const {
        const int count = end - begin;
        return {begin + count * task.share / task.num_shares, begin + count * (task.share + 1) / task.num_shares};
    }
};

template <class T> struct SlotAttention {
    const AttentionBlock& block;
    const Batch& batch;
    const AttentionMemory<T>& memory;
    const Rows<T> attended;
    const TaskList& list;
    const CacheGroup& group;

    SlotAttention(const AttentionBlock& attention, const Batch& b, const AttentionMemory<T>& m, const Rows<T>& output)
        : block(attention), batch(b), memory(m), attended(output), list(m.list_of(attention)),
          group(b.groups[attention.group]) {}

    void attend(const Task& task, const AttentionScratch<T>& scratch) const {
        const int64_t dim = block.head_dim, first_token = batch.row_offsets[task.row];
        int32_t limits[MOST_QUERIES];
        for (int q = 0; q < pad(task.num_queries, LANES); q++)
            limits[q] = q < task.num_queries ? batch.cache_lengths[task.row] + 1 +
                                                   int32_t((task.first_query + q) / list.heads_per_kv_head)
                                             : INT32_MAX;
        const Queries<T> own = queries_of(task, limits);
        prepare_few(scratch, own, task.num_heads, int(dim));
        for (int i = 0; task.split < 0 && i < task.num_heads; i++)
            start_merging(scratch.merged[i], task.num_queries, int(dim));
        // All rows read a common prefix from one slot, so that it stays in the caches from row to row.
        const int num_common = batch.common_slots ? batch.common_lengths[task.row] : 0;
        const KvView<T> slot = view_of(task, batch.slots[task.row]);
        const KvView<T> common = num_common ? view_of(task, batch.common_slots[task.row]) : slot;
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
    Queries<T> queries_of(const Task& task, const int32_t* limits) const {
        const int64_t head_stride = batch.num_tokens * list.heads_per_kv_head * block.head_dim;
        const int64_t first = batch.row_offsets[task.row] * list.heads_per_kv_head + task.first_query;
        const T* data = memory.queries + task.head * head_stride + first * block.head_dim;
        const Mask mask{limits, int(block.window)};
        return {data, task.num_queries, head_stride, mask, float(block.softcap * LOG2_E)};
    }

    KvView<T> view_of(const Task& task, int64_t slot) const {
        const int64_t start = slot * group.slot_stride + block.plane * group.plane_stride;
        const T* keys = static_cast<const T*>(group.blocks) + start + task.head * block.head_stride();
        const int64_t value_offset = block.num_common ? block.head_dim - block.num_common : group.value_offset;
        return {keys, keys + value_offset, group.token_stride, task.num_heads, int(block.head_dim)};
    }

    SoftmaxState state(const Task& task, int64_t chunk, int64_t head) const {
        const int64_t index = task.first_state + chunk * task.num_heads + head;
        const int64_t floats = SoftmaxState::floats(LANES, block.head_dim);
        return SoftmaxState::at(memory.states + index * floats, LANES);
    }

    // The thread that finishes a split's last share merges all chunks. False for other threads.
    bool merge_split(const Task& task, const Chunks& chunks, const AttentionScratch<T>& scratch) const {
        if (memory.shares_done[task.split].fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_shares) return false;
        memory.shares_done[task.split].store(0, std::memory_order_relaxed);  // for the next block
        for (int i = 0; i < task.num_heads; i++) {
            start_merging(scratch.merged[i], task.num_queries, int(block.head_dim));
            for (int chunk = chunks.begin; chunk < chunks.end; chunk++)
                merge(scratch.merged[i], state(task, chunk, i), task.num_queries, int(block.head_dim));
        }
        return true;
    }

    // As of a key with that score: scores are logarithms to base 2.
    float weight_of_sink(int64_t head, float maximum) const {
        if (!block.sinks) return 0;
        float weights[LANES];
        store16(weights, exp2_16(splat(block.sinks[head] * LOG2_E - maximum)));
        return weights[0];
    }

    void finish(const Task& task, int64_t kv_head, int64_t first_token, const SoftmaxState& merged) const {
        const int64_t dim = block.head_dim;
        for (int q = 0; q < task.num_queries; q++) {
            const int64_t index = task.first_query + q;
            const int64_t t = first_token + index / list.heads_per_kv_head;
            const int64_t head = kv_head * list.heads_per_kv_head + index % list.heads_per_kv_head;
            T* to = attended.values + t * attended.stride + head * dim;
            const float factor = 1 / (merged.sum[q] + weight_of_sink(head, merged.maximum[q]));
            int64_t d = 0;
            for (; d + 2 * LANES <= dim; d += 2 * LANES) {
                f32x16 low = load16(merged.output + q * dim + d), high = load16(merged.output + q * dim + d + LANES);
                restore_order(T{}, low, high);
                store32(to + block.place_of_value(d), low * factor, high * factor);
            }
            if (d < dim) store16(to + d, load16(merged.output + q * dim + d) * factor);
        }
    }
};
