// The block of a dense MLP: gate and up are one product, if there is a gate. Its tiles are activated while they are in
// the first-level cache.
#pragma once

#include "../stream.h"

template <class T, class W> struct DenseMlp {
    static constexpr int64_t STAGES = 5;  // at most, as the counters of a Team are counted

    const Stream<T, W>& stream;
    const InnerRows<T, W> gated;
    float* const output_gates;  // [T], if there are any
    float* const raw;           // of sparse ones: gates and up as their product gives them [T][2 width]

    // With memory for each such block of a piece.
    DenseMlp(const Stream<T, W>& s, const Sublayers& sublayers, Arena& arena)
        : stream(s), gated(arena, s.num_tokens, sublayers.most(&Sublayer::dense_mlp, width_of)),
          output_gates(arena.allocate<float>(
              sublayers.most(&Sublayer::dense_mlp, [&](const DenseMlpBlock& block) { return gates_of(block); }))),
          raw(arena.allocate<float>(s.num_tokens * sublayers.most(&Sublayer::dense_mlp, raw_width_of))) {}

    static bool reads(const DenseMlpBlock& block, bool plain) {
        return is_plain<W>(block.up) == plain ||
               (block.output_gate.columns && is_plain<W>(block.output_gate) == plain);
    }

    // Called in the stage before `run`.
    void begin(const DenseMlpBlock& block, int64_t t) const { rows_of(block).clear_padding(t, width_of(block)); }

    void run(Team& team, const DenseMlpBlock& block, const Target& target) const {
        const InnerRows<T, W> rows = rows_of(block);
        if (block.is_sparse)
            compute_sparse(team, block, rows.written);
        else
            compute(team, block, rows.written);
        if (block.output_gate.columns) compute_output_gates(team, block);
        team.wait();
        const Target scaled = target.times(block.output_scale);
        stream.leave(team, block.down, rows, width_of(block),
                     block.output_gate.columns ? scaled.times(output_gates) : scaled);
    }

  private:
    void compute(Team& team, const DenseMlpBlock& block, const Rows<T>& written) const {
        stream.multiply(
            team, block.up, UNIT_PANELS,
            [&](int64_t column, int64_t row, int count, const float* c, int stride, int width) {
                const int64_t to_stride = written.stride;
                T* to = written.values + row * to_stride + (block.is_gated ? column / 2 : column);
                const float scale = float(block.gate_scale);
                if (!block.is_gated)
                    square(c, stride, count, width, to, to_stride);
                else if (block.is_gelu)
                    gate<true>(c, stride, count, width, scale, to, to_stride);
                else
                    gate<false>(c, stride, count, width, scale, to, to_stride);
            });
    }

    // Whole rows have to be there before anything is cut off.
    void compute_sparse(Team& team, const DenseMlpBlock& block, const Rows<T>& written) const {
        const int64_t width = width_of(block);
        stream.keep_product(team, block.up, raw, raw_width_of(block));
        team.wait();
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            float* row = raw + t * raw_width_of(block);
            cut_off(block, row);
            T* to = written.values + t * written.stride;
            const int stride = 0, count = 1, both = int(2 * width);
            if (block.is_gelu)
                gate<true>(row, stride, count, both, float(block.gate_scale), to, stride);
            else
                gate<false>(row, stride, count, both, float(block.gate_scale), to, stride);
        });
    }

    // Gates less the mean of all and `cutoff` standard deviations, or 0 where that is more. Panels of 16 gates alternate
    // with such of up; behind the last gate are zeros.
    static void cut_off(const DenseMlpBlock& block, float* row) {
        const int64_t width = width_of(block), count = block.intermediate;
        f32x16 total{}, squares{};
        for (int64_t k = 0; k < width; k += LANES) total += load16(row + 2 * k);
        const float mean = sum16(total) / count;
        for (int64_t k = 0; k < width; k += LANES) {
            const f32x16 away = load16(row + 2 * k) - mean;
            squares += away * away;
        }
        const float variance = (sum16(squares) - (width - count) * mean * mean) / count;
        const float least = mean + float(block.cutoff) * __builtin_sqrtf(variance > 0 ? variance : 0);
        for (int64_t k = 0; k < width; k += LANES)
            store16(row + 2 * k, max16(load16(row + 2 * k) - least, splat(0.0f)));
    }

    static int64_t raw_width_of(const DenseMlpBlock& block) { return block.is_sparse ? 2 * width_of(block) : 0; }

    int64_t gates_of(const DenseMlpBlock& block) const { return block.output_gate.columns ? stream.num_tokens : 0; }

    void compute_output_gates(Team& team, const DenseMlpBlock& block) const {
        stream.multiply(team, block.output_gate, 1, [&](int64_t, int64_t row, int count, const float* c, int stride, int) {
            for (int r = 0; r < count; r++) output_gates[row + r] = first_of(sigmoid16(load16(c + r * stride)));
        });
    }

    static float first_of(f32x16 x) {
        float lanes[LANES];
        store16(lanes, x);
        return lanes[0];
    }

    static int64_t width_of(const DenseMlpBlock& block) { return pad(block.intermediate, LANES); }

    InnerRows<T, W> rows_of(const DenseMlpBlock& block) const { return gated.narrowed(block.intermediate); }

    template <bool IS_GELU>
    static void gate(const float* c, int stride, int count, int width, float scale, T* to,
                     int64_t to_stride) {
        for (int r = 0; r < count; r++, c += stride, to += to_stride)
            for (int k = 0; k < width; k += 2 * LANES) {
                const f32x16 gate = load16(c + k) * scale;
                store16(to + k / 2, (IS_GELU ? gelu16(gate) : silu16(gate)) * load16(c + k + LANES));
            }
    }

    static void square(const float* c, int stride, int count, int width, T* to, int64_t to_stride) {
        for (int r = 0; r < count; r++, c += stride, to += to_stride)
            for (int k = 0; k < width; k += LANES) {
                const f32x16 positive = max16(load16(c + k), splat(0.0f));
                store16(to + k, positive * positive);
            }
    }
};
