// The scales and offsets of weights in groups, which panel.h draws.
#pragma once

#include "format.h"

constexpr float OFFSET_OF_BYTE = -240;

// `ahead`: the distance, in scales, to the same place in the next panels, which is prefetched.
template <class T> INLINE f32x16 load_ahead(const void* from, int64_t place, int64_t ahead) {
    const T* scales = static_cast<const T*>(from) + place;
    __builtin_prefetch(scales + ahead, 0, 2);
    return load16(scales);
}

// Bytes are multiples of units where there are offsets, and else powers of 2.
template <bool HAS_OFFSETS> INLINE f32x16 load_scales(const Matrix& matrix, int64_t place, int64_t ahead) {
    if (matrix.scale_bits == 16) return load_ahead<half>(matrix.scales, place, ahead);
    if (HAS_OFFSETS) return load_ahead<uint8_t>(matrix.scales, place, ahead);
    return load_ahead<power_of_2>(matrix.scales, place, ahead);
}

INLINE f32x16 load_offsets(const Matrix& matrix, int64_t place, int64_t ahead) {
    return matrix.scale_bits == 16 ? load_ahead<half>(matrix.offsets, place, ahead)
                                   : load_ahead<uint8_t>(matrix.offsets, place, ahead) * OFFSET_OF_BYTE;
}

// The scales and offsets of a group of 32 in some neighbouring panels.
template <int PANELS, int SCALES> struct GroupScales {
    f32x16 scales[PANELS][SCALES] = {}, offsets[PANELS][SCALES] = {};
};

// Reads them, of one group after the other.
template <class Format, bool HAS_OFFSETS, int PANELS> class ScaleReader {
  public:
    typedef GroupScales<PANELS, Format::SCALES> Read;

    // From a group of a panel on. `panels_ahead`: those that are prefetched.
    INLINE ScaleReader(const Matrix& matrix, int64_t panel, int64_t group, int64_t panels_ahead)
        : matrix(matrix), panel_scales(matrix.depth / matrix.group_size * LANES),
          place(panel * panel_scales + group * GROUP / matrix.group_size * LANES), ahead(panels_ahead * panel_scales),
          left(-(group * GROUP % matrix.group_size)) {
        if constexpr (Format::HAS_STEPS) {
            panel_runs = panel_scales / LANES / matrix.scales_per_step, runs_ahead = panels_ahead * panel_runs;
            run = place / LANES / matrix.scales_per_step;
            left_of_run = -(place / LANES % matrix.scales_per_step);
        }
    }

    // Reads those of the next group, if they are others.
    INLINE void next(Read& to) {
        if constexpr (Format::HAS_STEPS) {
            load_counts(to);
        } else {
            left -= GROUP;
            if (left >= 0) return;
            left += matrix.group_size;
            load_numbers(to);
        }
        place += Format::SCALES * LANES;
    }

  private:
    const Matrix& matrix;
    const int64_t panel_scales;
    int64_t place;  // of the next scales, in the first panel
    const int64_t ahead;
    int64_t left;  // elements that the scales are for, after the group; with steps they are for one group
    int64_t panel_runs = 0, runs_ahead = 0, run = 0, left_of_run = 0;  // of scales that share a step
    f32x16 scale_steps[PANELS] = {}, offset_steps[PANELS] = {};

    INLINE void load_numbers(Read& to) {
        for (int p = 0; p < PANELS; p++) {
            const int64_t at = place + p * panel_scales;
            to.scales[p][0] = load_scales<HAS_OFFSETS>(matrix, at, ahead);
            if (HAS_OFFSETS) to.offsets[p][0] = load_offsets(matrix, at, ahead);
        }
    }

    INLINE void load_counts(Read& to) {
        typedef std::conditional_t<HAS_OFFSETS, uint8_t, int8_t> Count;
        constexpr bool ARE_HALVES = HAS_OFFSETS && Format::SCALES > 1;  // a scale and an offset share a byte
        left_of_run -= Format::SCALES;
        if (left_of_run < 0) load_steps();
        for (int p = 0; p < PANELS; p++)
            for (int s = 0; s < Format::SCALES; s++) {
                const int64_t at = place + p * panel_scales + s * LANES;
                f32x16 scale = load_ahead<Count>(matrix.scales, at, ahead), offset{};
                if constexpr (ARE_HALVES) {
                    offset = convert<f32x16>(convert<i32x16>(scale * 0.0625f));
                    scale = scale - offset * 16.0f;
                } else if (HAS_OFFSETS) {
                    offset = load_ahead<uint8_t>(matrix.offsets, at, ahead);
                }
                to.scales[p][s] = scale * scale_steps[p];
                if (HAS_OFFSETS) to.offsets[p][s] = offset * offset_steps[p];
            }
    }

    INLINE void load_steps() {
        constexpr int64_t SIZE = (1 + HAS_OFFSETS) * LANES;
        for (int p = 0; p < PANELS; p++) {
            const int64_t at = (run + p * panel_runs) * SIZE;
            scale_steps[p] = load_ahead<half>(matrix.steps, at, runs_ahead * SIZE);
            if (HAS_OFFSETS)
                offset_steps[p] = load_ahead<half>(matrix.steps, at + LANES, runs_ahead * SIZE) * float(Format::TIMES);
        }
        run++, left_of_run += matrix.scales_per_step;
    }
};
