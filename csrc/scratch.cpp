#include "scratch.h"

#include <cstdlib>
#include <new>

namespace apcbatch {
namespace {

struct Scratch {
    char* memory = nullptr;
    int64_t bytes = 0;
    ~Scratch() { std::free(memory); }
};

char* grown(Scratch& scratch, int64_t bytes) {
    if (scratch.bytes < bytes) {
        std::free(scratch.memory);
        scratch.bytes = 0;
        const int64_t rounded = (bytes + 4095) / 4096 * 4096;
        scratch.memory = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(rounded)));
        if (scratch.memory == nullptr) throw std::bad_alloc();
        scratch.bytes = rounded;
    }
    return scratch.memory;
}

}  // namespace

char* thread_scratch(int64_t bytes) {
    thread_local Scratch scratch;
    return grown(scratch, bytes);
}

char* thread_workspace(int64_t bytes) {
    thread_local Scratch workspace;
    return grown(workspace, bytes);
}

}  // namespace apcbatch
