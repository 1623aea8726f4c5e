#include "dispatch.h"

#include <atomic>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace apcbatch {
namespace {

// Requests AMX on Linux, which grants a process the tile registers only on request, permanently and for all
// threads.
bool system_allows(Isa isa) {
#if defined(__x86_64__) && defined(__linux__)
    constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (isa != Isa::amx) return true;
    static const bool granted = syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
    return granted;
#elif defined(__x86_64__)
    return isa != Isa::amx;
#else
    return isa == Isa::plain;
#endif
}

// Returns false if an instruction set is slower here than a more basic one. The bfloat16 dot product has
// twice the rate of float32 on AMD's processors and half of it on Intel's (measured on a Sapphire Rapids: 210
// against 380 GFLOP/s on two cores).
bool pays(Isa isa) {
#if defined(__x86_64__)
    return isa != Isa::avx512bf16 || __builtin_cpu_is("amd");
#else
    return isa == Isa::plain;
#endif
}

Isa fastest_isa() {
    Isa fastest = Isa::plain;
    for (const Isa candidate : kIsas) {
        if (pays(candidate) && isa_available(candidate)) fastest = candidate;
    }
    return fastest;
}

std::atomic<Isa>& current() {
    static std::atomic<Isa> value{fastest_isa()};
    return value;
}

}  // namespace

bool isa_available(Isa isa) {
    switch (isa) {
#define APC_HAS(feature) &&__builtin_cpu_supports(#feature)
#define APC_AVAILABLE(argument, name, kernels, attention, product, features) \
    case Isa::name:                                                          \
        return true features && system_allows(isa);
        APC_ISAS(APC_AVAILABLE, )
#undef APC_AVAILABLE
#undef APC_HAS
    }
    return false;
}

Isa isa() { return current().load(std::memory_order_relaxed); }

bool set_isa(Isa isa) {
    if (!isa_available(isa)) return false;
    current().store(isa, std::memory_order_relaxed);
    return true;
}

const char* isa_name(Isa isa) {
#define APC_NAME(argument, name, ...) #name,
    static const char* const names[] = {APC_ISAS(APC_NAME, )};
#undef APC_NAME
    return names[int(isa)];
}

const char* isa_product(Isa isa) {
#define APC_PRODUCT(argument, name, kernels, attention, product, ...) #product,
    static const char* const products[] = {APC_ISAS(APC_PRODUCT, )};
#undef APC_PRODUCT
    return products[int(isa)];
}

}  // namespace apcbatch
