// Attention of a batch, cut into tasks that threads take.
#pragma once

#include "attention.h"
#include "model.h"
#include "rows.h"

// Some queries of one row and some heads, and a share of the chunks that these see.
struct Task {
    int32_t row, head, num_heads, first_query, num_queries, share, num_shares;
    int32_t group;  // of tasks that share the chunks of these queries; -1: this one has them all
    int64_t first_partial;  // of the group, which has one for each chunk and head
};

struct TaskList {
    const Model& model;
    const Batch& batch;
    const int64_t group_size;  // query heads of a key/value head
    Task* tasks;
    int64_t count = 0;
    int64_t num_groups = 0;    // rows whose chunks several tasks share, by block of heads
    int64_t num_partials = 0;  // of all groups

    // A row of few queries is one task for all its heads (or MOST_HEADS of them). Where that does not make enough
    // tasks for the threads, several share the chunks of a row's keys.
    TaskList(const Model& m, const Batch& b, int num_threads, Arena& arena)
        : model(m), batch(b), group_size(m.num_heads / m.num_kv_heads) {
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
            const int32_t length = batch.cache_lengths[row] + batch.row_offsets[row + 1] - batch.row_offsets[row];
            const int32_t chunks = (length + CHUNK - 1) / CHUNK;
            if (queries_of(row) <= LANES)
                plan_small(row, int32_t(shares < chunks ? shares : chunks), chunks);
            else
                plan_large(row);
        }
    }

  private:
    bool is_dry_run = false;  // only to learn how much memory it takes

    int32_t queries_of(int64_t row) const {
        return int32_t((batch.row_offsets[row + 1] - batch.row_offsets[row]) * group_size);
    }

    void plan_small(int32_t row, int32_t shares, int64_t chunks) {
        const int32_t heads = int32_t(model.num_kv_heads);
        for (int32_t head = 0; head < heads; head += MOST_HEADS) {
            const int32_t group = shares > 1 ? int32_t(num_groups++) : -1;
            const int32_t num_heads = heads - head < MOST_HEADS ? heads - head : MOST_HEADS;
            for (int32_t s = 0; s < shares; s++)
                add({row, head, num_heads, 0, queries_of(row), s, shares, group, num_partials});
            if (shares > 1) num_partials += chunks * num_heads;
        }
    }

    void plan_large(int32_t row) {
        const int32_t count = queries_of(row);
        for (int32_t head = 0; head < model.num_kv_heads; head++)
            for (int32_t first = 0; first < count; first += MOST_QUERIES)
                add({row, head, 1, first, count - first < MOST_QUERIES ? count - first : MOST_QUERIES, 0, 1, -1, 0});
    }

    void add(const Task& task) {
        if (!is_dry_run) tasks[count] = task;
        count++;
    }
};
