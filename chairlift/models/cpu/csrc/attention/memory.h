// The memory of attention, which the blocks of a piece use one after the other: as much as the largest needs.
#pragma once

#include <atomic>

#include "tasks.h"

template <class T> struct AttentionMemory {
    T* queries;                         // [kv head][tokens * query heads][head_dim], scaled for exp2
    float* states;                      // SoftmaxStates, by split: [chunk][head]
    std::atomic<int32_t>* shares_done;  // [split]; all 0 between two blocks

    AttentionMemory(const Sublayers& sublayers, const Batch& batch, int num_threads, Arena& arena)
        : most_heads(sublayers.most(&Sublayer::attention, heads_of)),
          most_head_dim(sublayers.most(&Sublayer::attention, head_dim_of)) {
        const int64_t state_floats = plan_tasks(sublayers, batch, num_threads, arena);
        const auto width_of = [](const AttentionBlock& block) { return block.num_heads * block.head_dim; };
        queries = arena.allocate<T>(batch.num_tokens * sublayers.most(&Sublayer::attention, width_of));
        states = arena.allocate<float>(state_floats);
        shares_done = arena.allocate<std::atomic<int32_t>>(num_splits);
        scratch_bytes = allocate_scratch(nullptr);
        scratch = arena.allocate<char>(scratch_bytes * num_threads);
    }

    void prepare() const {
        for (int64_t split = 0; split < num_splits; split++) shares_done[split] = 0;
    }

    const TaskList& list_of(const AttentionBlock& block) const {
        const TaskList* list = lists;
        while (!have_equal_heads(*list->block, block)) {
            list++;
            CHECK(list < lists + num_lists);
        }
        return *list;
    }

    AttentionScratch<T> scratch_of(int rank) const {
        AttentionScratch<T> own;
        allocate_scratch(&own, scratch + rank * scratch_bytes);
        return own;
    }

  private:
    int64_t most_heads, most_head_dim;  // key/value heads of a task
    TaskList* lists;                    // one for each shape of heads
    int64_t num_lists = 0, num_splits = 0;
    char* scratch;  // per thread
    int64_t scratch_bytes;

    static int64_t head_dim_of(const AttentionBlock& block) { return block.head_dim; }

    static int64_t heads_of(const AttentionBlock& block) {
        return block.num_kv_heads < MOST_HEADS ? block.num_kv_heads : MOST_HEADS;
    }

    // Returns how many floats the states of any of the lists are.
    int64_t plan_tasks(const Sublayers& sublayers, const Batch& batch, int num_threads, Arena& arena) {
        int64_t num_shapes = 0, most_floats = 0;
        for (const Sublayer& each : sublayers) num_shapes += is_first_of_shape(each, sublayers);
        lists = arena.allocate<TaskList>(num_shapes);
        for (const Sublayer& each : sublayers) {
            if (!is_first_of_shape(each, sublayers)) continue;
            const TaskList list(*each.attention, batch, num_threads, arena);
            const int64_t floats = list.num_states * SoftmaxState::floats(LANES, each.attention->head_dim);
            if (floats > most_floats) most_floats = floats;
            if (list.num_splits > num_splits) num_splits = list.num_splits;
            if (arena.base) lists[num_lists] = list;
            num_lists++;
        }
        return most_floats;
    }

    // Looks at the nearest first, which mostly is of the same shape.
    static bool is_first_of_shape(const Sublayer& sublayer, const Sublayers& sublayers) {
        if (!sublayer.attention) return false;
        for (const Sublayer* each = &sublayer; each > sublayers.begin();)
            if ((--each)->attention && have_equal_heads(*each->attention, *sublayer.attention)) return false;
        return true;
    }

    int64_t allocate_scratch(AttentionScratch<T>* into, char* base = nullptr) const {
        Arena arena{base};
        AttentionScratch<T> s;
        const int64_t dim = most_head_dim, heads = most_heads;
        const int64_t rows = heads * LANES > QUERIES_AT_ONCE ? heads * LANES : QUERIES_AT_ONCE;
        s.queries = arena.allocate<typename Multiplied<T>::type>(heads * LANES * dim);
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
};
