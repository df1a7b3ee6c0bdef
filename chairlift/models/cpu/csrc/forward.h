// A piece of a decoder's forward pass in one parallel region: see models/decoder.py for the same in torch, operator by
// operator. All sublayers and both ends are a piece, too.
//
// The code of a kind of block (blocks/) is constructed once per piece, with memory for the largest of its blocks, and
// has STAGES; `prepare`, if there is anything to do before the threads start; `reads`, which tells in which formats its
// products read the stream; `begin`, its work on a token while the stream's rows are made; and `run`.
#pragma once

#include "blocks/altup.h"
#include "blocks/attention.h"
#include "blocks/dense_mlp.h"
#include "blocks/experts.h"
#include "blocks/gated_delta_net.h"
#include "blocks/gated_short_conv.h"
#include "blocks/laurel.h"
#include "blocks/mamba2.h"
#include "blocks/per_layer_input.h"

template <class T, class W> struct Forward {
    const Piece& piece;
    const Sublayers sublayers;
    const Stream<T, W> stream;
    const Attention<T, W> attention;
    const DenseMlp<T, W> dense_mlp;
    const Experts<T, W> experts;
    const StateRows state_rows;
    const GatedShortConv<T, W> gated_short_conv;
    const GatedDeltaNet<T, W> gated_delta_net;
    const Mamba2<T, W> mamba2;
    const PerLayerInput<T, W> per_layer_input;
    const Laurel<T, W> laurel;
    const AltUp<T, W> altup;
    const LayerInputsOfTokens<T, W> layer_inputs;
    const int64_t num_counters;
    Counter* const counters;

    Forward(const Model& model, const Batch& batch, const Piece& p, Arena& arena, int num_threads)
        : piece(p), sublayers(model, p), stream(model, batch, p.residual, has_post_norms(), has_sums(), has_plain(model), arena),
          attention(stream, sublayers, num_threads, arena), dense_mlp(stream, sublayers, arena),
          experts(stream, sublayers, arena), state_rows(batch, has_states(), arena), gated_short_conv(stream, state_rows, sublayers, arena),
          gated_delta_net(stream, state_rows, sublayers, num_threads, arena),
          mamba2(stream, state_rows, sublayers, num_threads, arena),
          per_layer_input(stream, sublayers, p.layer_inputs, arena), laurel(stream, sublayers, arena), altup(stream),
          layer_inputs{stream, model.layer_inputs, p.layer_inputs}, num_counters(num_stages() * num_threads),
          counters(arena.allocate<Counter>(num_counters)) {}

    // Called before the threads start.
    void prepare() const {
        std::memset((void*)counters, 0, sizeof(Counter) * num_counters);
        stream.prepare();
        attention.prepare();
        if (has_states()) state_rows.prepare();
    }

    void run(Team team) const {
        if (piece.is_first) {
            team.share_rows(stream.num_tokens, [&](int64_t t) { stream.embed(t); });
            team.wait();
            layer_inputs.run(team);
            altup.spread(team);
        }
        const Sublayer* before = nullptr;  // its end goes with the next stage
        for (const Sublayer& each : sublayers) {
            run_sublayer(team, each, before);
            before = &each;
        }
        if (!(before && before->has_end()) && !piece.hidden) return;
        if (altup.count && piece.hidden) {
            if (before) team.share_rows(stream.num_tokens, [&](int64_t t) { stream.end(t, *before, false); });
            team.wait();
            altup.merge(team);
            before = nullptr;
        }
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            if (before) stream.end(t, *before, sublayers.continue_to(*before));
            if (piece.hidden) stream.finish(t, static_cast<T*>(piece.hidden) + t * stream.model.hidden);
        });
    }

  private:
    // Calls `use(code, block)` with each block of a sublayer, and the code of its kind.
    template <class Use> void each_block(const Sublayer& sublayer, Use use) const {
        if (sublayer.attention) use(attention, *sublayer.attention);
        if (sublayer.dense_mlp) use(dense_mlp, *sublayer.dense_mlp);
        if (sublayer.experts) use(experts, *sublayer.experts);
        if (sublayer.gated_short_conv) use(gated_short_conv, *sublayer.gated_short_conv);
        if (sublayer.gated_delta_net) use(gated_delta_net, *sublayer.gated_delta_net);
        if (sublayer.mamba2) use(mamba2, *sublayer.mamba2);
        if (sublayer.per_layer_input) use(per_layer_input, *sublayer.per_layer_input);
        if (sublayer.laurel) use(laurel, *sublayer.laurel);
    }

    int64_t num_stages() const {
        int64_t sum = 2 + layer_inputs.STAGES;  // the embedding, what layers get of it, and the end
        sum += altup.num_stages();
        for (const Sublayer& each : sublayers) {
            sum++;
            each_block(each, [&](const auto& code, const auto&) { sum += code.STAGES; });
        }
        return sum;
    }

    bool has_post_norms() const {
        return sublayers.any([](const Sublayer& each) { return each.post_norm != nullptr; });
    }

    bool has_sums() const {
        return sublayers.any([](const Sublayer& each) { return each.is_continued != 0; });
    }

    bool has_states() const {
        return sublayers.any([](const Sublayer& each) { return each.has_state(); });
    }

    bool has_plain(const Model& model) const {
        if (piece.is_first && layer_inputs.reads(model.layer_inputs, true)) return true;
        if (AltUp<T, W>::reads(model.streams, true)) return true;
        return sublayers.any([&](const Sublayer& each) { return reads(each, true); });
    }

    // Whether products of it read rows that are not quantized although others are, or those others.
    bool reads(const Sublayer& sublayer, bool plain) const {
        bool is_read = false;
        each_block(sublayer, [&](const auto& code, const auto& block) { is_read |= code.reads(block, plain); });
        return is_read;
    }

    void run_sublayer(Team& team, const Sublayer& sublayer, const Sublayer* before) const {
        const bool is_rounded_read = reads(sublayer, false), is_plain_read = reads(sublayer, true);
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            if (before) stream.end(t, *before, sublayers.continue_to(*before));
            enter(t, sublayer, is_rounded_read, is_plain_read);
            each_block(sublayer, [&](const auto& code, const auto& block) { code.begin(block, t); });
        });
        team.wait();
        Target target = stream.first_target(sublayer.post_norm != nullptr);
        each_block(sublayer, [&](const auto& code, const auto& block) {
            code.run(team, block, target);
            target.is_sum = true;  // of the blocks that follow side by side
        });
    }

    // What the sublayer's blocks read of a token.
    void enter(int64_t t, const Sublayer& sublayer, bool is_rounded_read, bool is_plain_read) const {
        if (sublayer.predicts) altup.predict(*sublayer.predicts, t);
        if (!sublayer.corrects) return stream.enter(t, sublayer.pre_norm, is_rounded_read, is_plain_read);
        altup.correct(*sublayer.corrects, t);
        const float* factors = sublayer.corrects->output_scale;
        stream.enter_row(stream.x + t * stream.stride, t, is_rounded_read, is_plain_read, factors);
    }
};
