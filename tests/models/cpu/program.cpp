// One call of the kernels' C interface, for where there is no Python to make it. The call and the memory it is about come
// on the standard input; what it returns, and the memory in which it may have written, go to the other.
// With an argument: what Linux says that the processor has.
#include <sys/auxv.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int chairlift_start(int64_t* sizes);
int64_t chairlift_forward(const void* model, const void* batch, const void* piece, int format, void* workspace,
                          int threads);
int64_t chairlift_logits(const void* model, const void* hidden, int64_t num_rows, int format, float* out,
                         void* workspace, int threads);
}

struct Call {  // as in standalone.py
    int64_t num_regions, num_pointers, num_outputs;
    int64_t model, input, piece;
    int64_t num_rows, logits;  // num_rows 0: a forward pass, whose input is a batch
    int64_t format, num_threads;
};

struct Region {
    int64_t start, size;
    char* memory;
};

static void read_all(void* to, int64_t size) {
    if (fread(to, 1, size_t(size), stdin) != size_t(size)) abort();
}

static char* allocate(int64_t size) {  // exactly as much, for sanitizers; what is read before it is written is no number
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, size_t(size))) abort();
    return static_cast<char*>(memset(memory, 0xff, size_t(size)));
}

int main(int count, char**) {
    if (count > 1) return printf("%lu %lu\n", getauxval(AT_HWCAP), getauxval(AT_HWCAP2)) < 0;
    int64_t sizes[64];  // more than there are
    if (chairlift_start(sizes)) abort();
    Call call;
    read_all(&call, sizeof call);
    std::vector<Region> regions;
    for (int64_t i = 0; i < call.num_regions; i++) {
        Region region;
        read_all(&region.start, 2 * sizeof(int64_t));
        region.memory = allocate(region.size);
        read_all(region.memory, region.size);
        regions.push_back(region);
    }
    const auto find = [&](int64_t place) {
        for (const Region& each : regions)
            if (each.start <= place && place < each.start + each.size) return each.memory + (place - each.start);
        abort();
    };
    for (int64_t i = 0; i < call.num_pointers; i++) {  // each is a place as yet
        int64_t place, target;
        read_all(&place, sizeof place);
        memcpy(&target, find(place), sizeof target);
        const char* pointer = find(target);
        memcpy(find(place), &pointer, sizeof pointer);
    }
    const void *model = find(call.model), *input = find(call.input);
    char* workspace = nullptr;
    const auto run = [&] {
        const int format = int(call.format), threads = int(call.num_threads);
        if (!call.num_rows) return chairlift_forward(model, input, find(call.piece), format, workspace, threads);
        float* logits = reinterpret_cast<float*>(find(call.logits));
        return chairlift_logits(model, input, call.num_rows, format, logits, workspace, threads);
    };
    workspace = allocate(run());
    const int64_t result = run();
    fwrite(&result, sizeof result, 1, stdout);
    for (int64_t i = 0; i < call.num_outputs; i++) {
        int64_t place, size;
        read_all(&place, sizeof place);
        read_all(&size, sizeof size);
        fwrite(find(place), 1, size_t(size), stdout);
    }
    for (const Region& each : regions) free(each.memory);
    free(workspace);
}
