// Attention of a batch, cut into tasks that threads take.
//
// A row of few queries is one task for all its key/value heads, or for each MOST_HEADS of them. If that makes too few
// tasks for the threads, the row is split: several tasks have a share of its chunks each. With 3 shares of 820 keys:
//
//     keys     0       128       256       384       512       640       768 820
//     chunks   |    0    |    1    |    2    |    3    |    4    |    5    | 6 |
//     states   |   s0    |   s1    |   s2    |   s3    |   s4    |   s5    | s6|
//     tasks    |------ share 0 ----|------ share 1 ----|-------- share 2 ------|
//
// Each task leaves a SoftmaxState for each of its chunks and heads. The task that ends last merges s0 to s6, in this
// order; a task that is not split merges its chunks in the same order as it goes. So the bits of the result do not
// depend on the number of shares. Rows of many queries, which are parts of prompts, are cut by heads and by
// MOST_QUERIES queries instead. Tasks are the units that `Team::share` hands out: see team.h.
#pragma once

#include "../memory.h"
#include "../model.h"
#include "chunk.h"

// Some queries of one row and some heads, and a share of the chunks that these see.
struct Task {
    int32_t row, head, num_heads, first_query, num_queries, share, num_shares;
    int32_t split;        // number of the split of which this is a share; -1: this task has all chunks
    int64_t first_state;  // of the split, which has one state for each chunk and head
};

inline bool have_equal_heads(const AttentionBlock& one, const AttentionBlock& other) {
    return one.num_heads == other.num_heads && one.num_kv_heads == other.num_kv_heads &&
           one.head_dim == other.head_dim && one.num_common == other.num_common;
}

// Key/value heads of a task at most. With elements in common, those of neighbouring heads do not follow one another.
inline int64_t heads_at_once(const AttentionBlock& block) { return block.num_common ? 1 : MOST_HEADS; }

// The tasks of a batch for blocks whose heads are those of `block`.
struct TaskList {
    const AttentionBlock* block;
    const Batch* batch;
    int64_t heads_per_kv_head;  // query heads
    Task* tasks;
    int64_t count = 0;
    int64_t num_splits = 0;
    int64_t num_states = 0;  // of all splits

    TaskList(const AttentionBlock& one, const Batch& b, int num_threads, Arena& arena)
        : block(&one), batch(&b), heads_per_kv_head(one.num_heads / one.num_kv_heads) {
        const int64_t heads = one.num_kv_heads, at_once = heads_at_once(one), head_blocks = (heads + at_once - 1) / at_once;
        int64_t num_small = 0, num_large = 0;
        const auto count_tasks = [&] {
            num_small = num_large = 0;
            for (int64_t row = 0; row < batch->num_rows; row++) {
                if (is_small(row))
                    num_small += head_blocks * parts_of(row);
                else
                    num_large += heads * ((queries_of(row) + MOST_QUERIES - 1) / MOST_QUERIES);
            }
        };
        count_tasks();
        if (num_small + num_large < num_threads) {
            are_tokens_small = true;
            count_tasks();
        }
        constexpr int64_t TASKS_PER_THREAD = 4;
        const int64_t shares = num_small ? (TASKS_PER_THREAD * num_threads - 1) / (num_small + num_large) + 1 : 1;
        tasks = arena.allocate<Task>(num_small * shares + num_large);
        is_dry_run = arena.base == nullptr;
        for (int32_t row = 0; row < batch->num_rows; row++) {
            const int32_t length = batch->cache_lengths[row] + batch->row_offsets[row + 1] - batch->row_offsets[row];
            const int32_t chunks = (length + CHUNK - 1) / CHUNK;
            if (is_small(row))
                plan_small(row, int32_t(shares < chunks ? shares : chunks), chunks);
            else
                plan_large(row);
        }
    }

  private:
    bool is_dry_run = false;  // only to learn how much memory it takes
    // Threads share the chunks of a single token, too, if a key/value head has more queries than LANES. Each LANES of them
    // pack its keys then, so that this pays where threads would have nothing to do.
    bool are_tokens_small = false;

    int32_t queries_of(int64_t row) const {
        return int32_t((batch->row_offsets[row + 1] - batch->row_offsets[row]) * heads_per_kv_head);
    }

    bool is_small(int64_t row) const {
        return queries_of(row) <= LANES || (are_tokens_small && queries_of(row) == heads_per_kv_head);
    }

    int32_t parts_of(int64_t row) const { return (queries_of(row) + LANES - 1) / LANES; }

    void plan_small(int32_t row, int32_t shares, int64_t chunks) {
        const int32_t heads = int32_t(block->num_kv_heads), at_once = int32_t(heads_at_once(*block));
        const int32_t count = queries_of(row), parts = parts_of(row);
        for (int32_t part = 0; part < parts; part++) {
            const int32_t first = count * part / parts, own = count * (part + 1) / parts - first;
            for (int32_t head = 0; head < heads; head += at_once) {
                const int32_t split = shares > 1 ? int32_t(num_splits++) : -1;
                const int32_t num_heads = heads - head < at_once ? heads - head : at_once;
                for (int32_t s = 0; s < shares; s++)
                    add({row, head, num_heads, first, own, s, shares, split, num_states});
                if (shares > 1) num_states += chunks * num_heads;
            }
        }
    }

    void plan_large(int32_t row) {
        const int32_t count = queries_of(row);
        for (int32_t head = 0; head < block->num_kv_heads; head++)
            for (int32_t first = 0; first < count; first += MOST_QUERIES)
                add({row, head, 1, first, count - first < MOST_QUERIES ? count - first : MOST_QUERIES, 0, 1, -1, 0});
    }

    void add(const Task& task) {
        if (!is_dry_run) tasks[count] = task;
        count++;
    }
};
