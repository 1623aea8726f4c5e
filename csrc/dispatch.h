// Which instruction set the kernels use: chosen from what the processor has, changed by set_isa.
// Every kernel keeps one function per instruction set and asks for_isa which of them to call.
#pragma once

namespace apcbatch {

// avx512bf16 is avx512 with the bfloat16 dot product; only the matrix product tells them apart.
enum class Isa : int { plain = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3 };

bool isa_available(Isa isa);  // built in, and this processor and operating system have it
Isa isa();                    // the one in use: the fastest available until set_isa
bool set_isa(Isa isa);        // false, and no change, where it is not available
const char* isa_name(Isa isa);

#if defined(__x86_64__)
#define APC_HAS_X86_ISAS 1
#else
#define APC_HAS_X86_ISAS 0
#endif

// The entry of the instruction set in use. On processors other than x86-64 all three arguments are the plain
// one.
template <class Function>
Function for_isa(Function plain, Function avx2, Function avx512) {
    switch (isa()) {
        case Isa::avx512bf16:
        case Isa::avx512:
            return avx512;
        case Isa::avx2:
            return avx2;
        default:
            return plain;
    }
}

}  // namespace apcbatch
