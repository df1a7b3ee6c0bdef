// The block of a mixture of experts. A run is all tokens that go to one expert, and their entries stand side by side:
//
//     entries   | token 0, token 3 | token 1 | token 0, token 1, token 2 | ...   those of the expert 5, of 8, of 13 ...
//     runs      | 5: 0, 2          | 8: 2, 1 | 13: 3, 3                  | ...   expert: first entry, count
//
// Threads share columns of the weights, not experts. Each row of a product is by itself, and a token's experts are
// added up in the order of their numbers, by the one thread that has the columns: so a token's bits depend on it alone.
#pragma once

#include "../stream.h"
#include "router.h"

template <class T, class W> struct Experts {
    static constexpr int64_t STAGES = 7;  // at most, as the counters of a Team are counted

    const Stream<T, W>& stream;
    const Routing routing;
    const Rows<W> rounded;      // the rows of runs with several tokens, gathered
    const Rows<T> plain;        // if W is Group: the same for plain matrices, if there are any
    const InnerRows<T, W> gated;  // of each entry
    const Rows<T> routed;         // what routers with a norm of their own read, if there are any

    // With memory for each such block of a piece.
    Experts(const Stream<T, W>& s, const Sublayers& sublayers, Arena& arena)
        : stream(s), routing(sublayers, s.num_tokens, arena),
          rounded(arena, gathered(sublayers, false), s.model.hidden),
          plain(arena, Rows<W>::IS_QUANTIZED ? gathered(sublayers, true) : 0, s.model.hidden),
          gated(arena, routing.most_entries, sublayers.most(&Sublayer::experts, width_of)),
          routed(arena, s.num_tokens * has_router_norms(sublayers), s.model.hidden) {}

    static bool reads(const ExpertsBlock& block, bool plain) {
        return (!block.router_norm && is_plain<W>(block.router) == plain) || is_plain<W>(block.gate) == plain || is_plain<W>(block.up) == plain;
    }

    // Called in the stage before `run`.
    void begin(const ExpertsBlock& block, int64_t t) const {
        if (!block.router_norm) return;
        const float* x = stream.x + t * stream.stride;
        normalize(x, block.router_norm, stream.model.hidden, float(stream.model.eps), routed, t);
    }

    void run(Team& team, const ExpertsBlock& block, const Target& target) const {
        const int64_t columns = pad(block.num_experts, LANES);
        if (block.router_norm)
            stream.keep_product(team, block.router, routed, routing.scores, columns);
        else
            stream.keep_product(team, block.router, routing.scores, columns);
        team.wait();
        routing.route(team, block);
        if (stream.num_tokens > 1) gather(team, block);
        activate(team, block);
        if (Rows<W>::IS_QUANTIZED && !is_plain<W>(block.down)) quantize_rows(team, block);
        add(team, block, target);
    }

  private:
    static constexpr int NARROW_UNIT_PANELS = 2;  // of a unit where there would be too few for all threads
    static constexpr int UNITS_PER_THREAD = 4;

    static int64_t width_of(const ExpertsBlock& block) { return pad(block.intermediate, LANES); }

    static bool has_router_norms(const Sublayers& sublayers) {
        return sublayers.any([](const Sublayer& each) { return each.experts && each.experts->router_norm; });
    }

    // Rows of memory that gathering takes for products of that kind.
    int64_t gathered(const Sublayers& sublayers, bool is_plain_read) const {
        if (stream.num_tokens <= 1) return 0;
        const bool is_needed = sublayers.any([&](const Sublayer& each) {
            return each.experts && (is_plain<W>(each.experts->gate) == is_plain_read ||
                                    is_plain<W>(each.experts->up) == is_plain_read);
        });
        return is_needed ? routing.most_entries : 0;
    }

    InnerRows<T, W> inner_of(const ExpertsBlock& block) const { return gated.narrowed(block.intermediate); }

    // Neighbouring entries of a run that are multiplied at once.
    struct Part {
        int64_t first;
        int count;
    };

    static Part part_of(const Run& run, int64_t start) {
        const int64_t left = run.count - start;
        return {run.first + start, left < ROWS_AT_ONCE ? int(left) : ROWS_AT_ONCE};
    }

    // The rows of a part for the first products: where the stream has them, if it is a single one.
    template <class R> R rows_of(const Run& run, const Part& part, const R& all, const R& of_parts) const {
        return run.count == 1 ? all.at(routing.entries[run.first].token) : of_parts.block(part.first, part.count);
    }

    // What to prefetch while panels are multiplied by a run's entries from `start` on: those that are multiplied next.
    static Prefetch expected(int64_t next, int64_t panel, int64_t start) {
        Prefetch prefetch;
        prefetch.is_first = start == 0;
        prefetch.panels_ahead = next - panel;
        return prefetch;
    }

    void multiply(const Matrix& matrix, const Run& run, const Part& part, int64_t panel, int panels, float* c,
                  int stride, const Prefetch& prefetch) const {
        if (Rows<W>::IS_QUANTIZED && is_plain<W>(matrix))
            rows_of(run, part, stream.plain, plain)
                .multiply_by(matrix, 0, part.count, panel, panels, c, stride, prefetch);
        else
            rows_of(run, part, stream.normed, rounded)
                .multiply_by(matrix, 0, part.count, panel, panels, c, stride, prefetch);
    }

    // Copies the rows of runs with several tokens.
    void gather(Team& team, const ExpertsBlock& block) const {
        const bool is_rounded_read = !is_plain<W>(block.gate) || !is_plain<W>(block.up);
        const bool is_plain_read = is_plain<W>(block.gate) || is_plain<W>(block.up);
        team.share_rows(routing.num_entries(block), [&](int64_t i) {
            const Run& run = routing.runs[routing.entries[i].run];
            if (run.count == 1) return;
            const Part part = part_of(run, (i - run.first) / ROWS_AT_ONCE * ROWS_AT_ONCE);
            const int64_t token = routing.entries[i].token, row = i - part.first;
            if (is_rounded_read) rounded.block(part.first, part.count).copy(row, stream.normed, token);
            if (is_plain_read) plain.block(part.first, part.count).copy(row, stream.plain, token);
        });
        team.wait();
    }

    // activation(gate(x)) * up(x) of all entries.
    void activate(Team& team, const ExpertsBlock& block) const {
        const InnerRows<T, W> inner = inner_of(block);
        const int64_t panels = width_of(block) / LANES, units = (panels + UNIT_PANELS - 1) / UNIT_PANELS;
        constexpr int STRIDE = UNIT_PANELS * LANES;
        const int64_t num_tasks = *routing.num_runs * units;
        const auto panel_of = [&](int64_t task) {
            return routing.runs[task / units].expert * panels + task % units * UNIT_PANELS;
        };
        team.share(num_tasks, [&](int64_t task) {
            alignas(64) float gates[ROWS_AT_ONCE * STRIDE], ups[ROWS_AT_ONCE * STRIDE];
            const Run& run = routing.runs[task / units];
            const int64_t panel = task % units * UNIT_PANELS, first_panel = panel_of(task);
            const int64_t next = panel_of(task + 1 < num_tasks ? task + 1 : task);
            const int width = UNIT_PANELS < panels - panel ? UNIT_PANELS : int(panels - panel);
            for (int64_t start = 0; start < run.count; start += ROWS_AT_ONCE) {
                const Part part = part_of(run, start);
                const Prefetch prefetch = expected(next, first_panel, start);
                multiply(block.gate, run, part, first_panel, width, gates, STRIDE, prefetch);
                multiply(block.up, run, part, first_panel, width, ups, STRIDE, prefetch);
                for (int r = 0; r < part.count; r++) {
                    T* to = inner.written.values + (part.first + r) * inner.written.stride + panel * LANES;
                    for (int k = 0; k < width * LANES; k += LANES) {
                        const int64_t column = first_panel * LANES + k;
                        const f32x16 gate = with_bias(block.gate, column, gates + r * STRIDE + k);
                        store16(to + k, activated(block, gate, with_bias(block.up, column, ups + r * STRIDE + k)));
                    }
                    if (panel + width == panels) inner.clear_padding(part.first + r, width_of(block));
                }
            }
        });
        team.wait();
    }

    static f32x16 with_bias(const Matrix& matrix, int64_t column, const float* c) {
        return matrix.bias ? load16(c) + load16(matrix.bias + column) : load16(c);
    }

    static f32x16 activated(const ExpertsBlock& block, f32x16 gate, f32x16 up) {
        if (block.activation == 0) return silu16(gate) * up;
        if (block.activation == 1) return gelu16(gate) * up;
        const f32x16 limit = splat(float(block.limit));
        gate = select(gate > limit, limit, gate);  // NaN stays NaN
        up = select(up > limit, limit, select(up < -limit, -limit, up));
        return (up + 1.0f) * (gate * sigmoid16(gate * float(block.alpha)));
    }

    void quantize_rows(Team& team, const ExpertsBlock& block) const {
        const InnerRows<T, W> inner = inner_of(block);
        team.share_rows(routing.num_entries(block), [&](int64_t i) {
            const Run& run = routing.runs[routing.entries[i].run];
            const Part part = part_of(run, (i - run.first) / ROWS_AT_ONCE * ROWS_AT_ONCE);
            convert_row(inner.written.values + i * inner.written.stride, width_of(block),
                        inner.multiplied.block(part.first, part.count), i - part.first);
        });
        team.wait();
    }

    // The last products, of all experts for some columns.
    void add(Team& team, const ExpertsBlock& block, const Target& target) const {
        const InnerRows<T, W> inner = inner_of(block);
        const int64_t panels = stream.stride / LANES;
        const bool is_wide = panels >= UNITS_PER_THREAD * UNIT_PANELS * team.size;
        const int unit_panels = is_wide ? UNIT_PANELS : NARROW_UNIT_PANELS;
        constexpr int STRIDE = UNIT_PANELS * LANES;
        team.share((panels + unit_panels - 1) / unit_panels, [&](int64_t unit) {
            alignas(64) float c[ROWS_AT_ONCE * STRIDE];
            const int64_t panel = unit * unit_panels;
            const int width = unit_panels < panels - panel ? unit_panels : int(panels - panel);
            float* const to = target.to + panel * LANES;
            if (!target.is_sum)
                for (int64_t t = 0; t < stream.num_tokens; t++)
                    std::memset((void*)(to + t * stream.stride), 0, width * LANES * sizeof(float));
            for (int32_t i = 0; i < *routing.num_runs; i++) {
                const Run& run = routing.runs[i];
                const int64_t first_panel = run.expert * panels + panel;
                const bool is_last = i + 1 == *routing.num_runs;  // then the next unit begins, with the first expert
                const int64_t next = routing.runs[is_last ? 0 : i + 1].expert * panels + panel + is_last * unit_panels;
                for (int64_t start = 0; start < run.count; start += ROWS_AT_ONCE) {
                    const Part part = part_of(run, start);
                    multiply_inner(block.down, inner, part, first_panel, width, c, STRIDE,
                                   expected(next, first_panel, start));
                    add_part(block, part, first_panel * LANES, width * LANES, c, target.scale, to);
                }
            }
        });
        team.wait();
    }

    static void multiply_inner(const Matrix& matrix, const InnerRows<T, W>& inner, const Part& part, int64_t panel,
                               int panels, float* c, int stride, const Prefetch& prefetch) {
        if (Rows<W>::IS_QUANTIZED && is_plain<W>(matrix))
            inner.written.block(part.first, part.count)
                .multiply_by(matrix, 0, part.count, panel, panels, c, stride, prefetch);
        else
            inner.multiplied.block(part.first, part.count)
                .multiply_by(matrix, 0, part.count, panel, panels, c, stride, prefetch);
    }

    void add_part(const ExpertsBlock& block, const Part& part, int64_t column, int width, const float* c, float scale,
                  float* to) const {
        for (int r = 0; r < part.count; r++, c += UNIT_PANELS * LANES) {
            const Entry& entry = routing.entries[part.first + r];
            const float weight = entry.weight * scale;
            float* row = to + entry.token * stream.stride;
            for (int k = 0; k < width; k += LANES)
                store16(row + k, load16(row + k) + with_bias(block.down, column + k, c + k) * weight);
        }
    }
};
