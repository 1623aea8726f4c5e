// Which instruction set the kernels use: chosen from what the processor has, changed by set_isa.
// Every kernel has one function for each instruction set, and asks APC_FOR_ISA which of them to call.
#pragma once

#include "instruction_sets.h"

namespace apcbatch {

#define APC_ISA_ENUMERATOR(argument, name, ...) name,
enum class Isa : int { APC_ISAS(APC_ISA_ENUMERATOR, ) };
#undef APC_ISA_ENUMERATOR

#define APC_ISA_ENTRY(argument, name, ...) Isa::name,
constexpr Isa kIsas[] = {APC_ISAS(APC_ISA_ENTRY, )};  // the plainest first
#undef APC_ISA_ENTRY
constexpr int kNumIsas = int(sizeof(kIsas) / sizeof(kIsas[0]));

bool isa_available(Isa isa);  // this processor and operating system have it
Isa isa();                    // the one in use: the fastest available until set_isa
bool set_isa(Isa isa);        // false, and no change, where it is not available
const char* isa_name(Isa isa);
const char* isa_product(Isa isa);  // how it multiplies bfloat16 weights: instruction_sets.h

// The entry of the instruction set in use.
template <class Function>
Function for_isa(const Function (&entries)[kNumIsas]) {
    return entries[int(isa())];
}

#define APC_SHARED_KERNEL(function, name, kernels, ...) &kernels::function,
#define APC_ATTENTION_KERNEL(function, name, kernels, attention, ...) &attention::function,
#define APC_OWN_KERNEL(function, name, ...) &name::function,
// The kernel of this name for the instruction set in use; for attention; for the matrix product, whose
// kernels no set shares.
#define APC_FOR_ISA(function) for_isa({APC_ISAS(APC_SHARED_KERNEL, function)})
#define APC_FOR_ISA_ATTENTION(function) for_isa({APC_ISAS(APC_ATTENTION_KERNEL, function)})
#define APC_FOR_OWN_ISA(function) for_isa({APC_ISAS(APC_OWN_KERNEL, function)})

}  // namespace apcbatch
