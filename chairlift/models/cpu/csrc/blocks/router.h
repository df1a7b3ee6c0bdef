// The router of a mixture of experts: which experts each token goes to, and the entries that come of it.
#pragma once

#include "../linear.h"

// A token that goes to an expert.
struct Entry {
    int32_t token;
    int32_t run;
    float weight;  // of the expert's output
};

// The entries of one expert.
struct Run {
    int32_t expert, first, count;
};

struct Choice {
    int32_t expert;
    float weight;
};

struct Routing {
    const int64_t num_tokens;
    const int64_t most_entries;  // of a block of a piece
    float* const scores;         // [T][experts, padded]: logits, and what becomes of them
    float* const compared;       // likewise: scores as they are compared
    uint8_t* const is_out;       // likewise: the expert is chosen already, or must not be
    Choice* const choices;       // [T][chosen]
    Entry* const entries;        // [T * chosen], by expert, and an expert's by token
    Run* const runs;             // of the experts that tokens go to, in order
    int32_t* const num_runs;

    Routing(const Sublayers& sublayers, int64_t tokens, Arena& arena)
        : num_tokens(tokens), most_entries(tokens * sublayers.most(&Sublayer::experts, chosen_of)),
          scores(arena.allocate<float>(tokens * most_experts(sublayers))),
          compared(arena.allocate<float>(tokens * most_experts(sublayers))),
          is_out(arena.allocate<uint8_t>(tokens * most_experts(sublayers))),
          choices(arena.allocate<Choice>(most_entries)), entries(arena.allocate<Entry>(most_entries)),
          runs(arena.allocate<Run>(most_experts(sublayers))), num_runs(arena.allocate<int32_t>(1)) {}

    int64_t num_entries(const ExpertsBlock& block) const { return num_tokens * block.num_chosen; }

    // From logits to entries and runs.
    void route(Team& team, const ExpertsBlock& block) const {
        const bool are_few = num_tokens <= FEW_TOKENS;
        if (!are_few) {
            team.share_rows(num_tokens, [&](int64_t t) { choose(block, t); });
            team.wait();
        }
        team.share(1, [&](int64_t) {
            for (int64_t t = 0; are_few && t < num_tokens; t++) choose(block, t);
            sort(block);
        });
        team.wait();
    }

  private:
    static constexpr int64_t FEW_TOKENS = 4;  // whose choice takes less time than threads wait for each other

    static int64_t chosen_of(const ExpertsBlock& block) { return block.num_chosen; }

    static int64_t most_experts(const Sublayers& sublayers) {
        return sublayers.most(&Sublayer::experts, [](const ExpertsBlock& block) { return pad(block.num_experts, LANES); });
    }

    void choose(const ExpertsBlock& block, int64_t t) const {
        const int64_t width = pad(block.num_experts, LANES), num_chosen = block.num_chosen;
        float *const own = scores + t * width, *const other = compared + t * width;
        uint8_t* const out = is_out + t * width;
        if (block.is_sigmoid)
            for (int64_t k = 0; k < width; k += LANES) store16(own + k, sigmoid16(load16(own + k)));
        else
            softmax(own, block.num_experts);
        for (int64_t e = 0; e < block.num_experts; e++) {
            other[e] = block.choice_bias ? own[e] + block.choice_bias[e] : own[e];
            out[e] = 0;
        }
        if (block.num_chosen_groups < block.num_groups) leave_groups_out(block, other, out);
        Choice* const chosen = choices + t * num_chosen;
        float sum = 0;
        for (int64_t i = 0; i < num_chosen; i++) {
            const int32_t best = best_of(other, out, block.num_experts);
            out[best] = 1;
            chosen[i] = {best, own[best]};
            sum += own[best];
        }
        const float divisor = block.is_normalized ? sum + float(block.eps) : 1;
        for (int64_t i = 0; i < num_chosen; i++) {
            chosen[i].weight = chosen[i].weight / divisor * float(block.scale);
            if (block.expert_scales) chosen[i].weight *= block.expert_scales[chosen[i].expert];
        }
    }

    static void softmax(float* x, int64_t count) {
        float largest = x[0];
        for (int64_t k = 1; k < count; k++) largest = x[k] > largest ? x[k] : largest;
        const int64_t width = pad(count, LANES);
        for (int64_t k = 0; k < width; k += LANES) store16(x + k, exp2_16((load16(x + k) - largest) * LOG2_E));
        for (int64_t k = count; k < width; k++) x[k] = 0;
        f32x16 sums{};
        for (int64_t k = 0; k < width; k += LANES) sums += load16(x + k);
        const float sum = sum16(sums);
        for (int64_t k = 0; k < width; k += LANES) store16(x + k, load16(x + k) / sum);
    }

    // The first of the best that are not out; where scores are no numbers, the first that is not.
    static int32_t best_of(const float* x, const uint8_t* out, int64_t count) {
        int32_t best = -1;
        for (int32_t k = 0; k < count; k++)
            if (!out[k] && (best < 0 || x[k] > x[best])) best = k;
        return best;
    }

    // Leaves out the experts of all groups but those whose best has the largest score, or two best the largest sums.
    static void leave_groups_out(const ExpertsBlock& block, const float* x, uint8_t* out) {
        const int64_t size = block.num_experts / block.num_groups;
        std::memset(out, 1, block.num_experts);
        for (int64_t i = 0; i < block.num_chosen_groups; i++) {
            int64_t best = -1;
            float best_sum = 0;
            for (int64_t g = 0; g < block.num_groups; g++) {
                if (!out[g * size]) continue;
                const float* own = x + g * size;
                const float sum = block.num_scored_of_group == 1 ? best_score(own, size) : sum_of_best_two(own, size);
                if (best < 0 || sum > best_sum) best = g, best_sum = sum;
            }
            std::memset(out + best * size, 0, size);
        }
    }

    static float best_score(const float* x, int64_t count) {
        float best = x[0];
        for (int64_t k = 1; k < count; k++) best = x[k] > best ? x[k] : best;
        return best;
    }

    static float sum_of_best_two(const float* x, int64_t count) {
        float first = x[0] > x[1] ? x[0] : x[1], second = x[0] > x[1] ? x[1] : x[0];
        for (int64_t k = 2; k < count; k++) {
            if (x[k] > first)
                second = first, first = x[k];
            else if (x[k] > second)
                second = x[k];
        }
        return first + second;
    }

    // Entries and runs from the choices of all tokens. A run's count is 0 until it has its place.
    void sort(const ExpertsBlock& block) const {
        const int64_t count = num_entries(block);
        int32_t* const counts = reinterpret_cast<int32_t*>(compared);  // of each expert, then its run
        std::memset((void*)counts, 0, block.num_experts * sizeof(int32_t));
        for (int64_t i = 0; i < count; i++) counts[choices[i].expert]++;
        int32_t used = 0, first = 0;
        for (int32_t e = 0; e < block.num_experts; e++) {
            if (!counts[e]) continue;
            runs[used] = {e, first, 0};
            first += counts[e];
            counts[e] = used++;
        }
        *num_runs = used;
        for (int64_t i = 0; i < count; i++) {
            Run& run = runs[counts[choices[i].expert]];
            entries[run.first + run.count++] = {int32_t(i / block.num_chosen), counts[choices[i].expert],
                                                choices[i].weight};
        }
    }
};
