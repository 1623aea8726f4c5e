// Select the instruction set of the kernels: the fastest one available, until set_isa changes it. Every
// kernel has one function per instruction set; APC_FOR_ISA returns the one to call.
#pragma once

#include "instruction_sets.h"

namespace apcbatch {

#define APC_ISA_ENUMERATOR(argument, name, ...) name,
enum class Isa : int { APC_ISAS(APC_ISA_ENUMERATOR, ) };
#undef APC_ISA_ENUMERATOR

#define APC_ISA_ENTRY(argument, name, ...) Isa::name,
constexpr Isa kIsas[] = {APC_ISAS(APC_ISA_ENTRY, )};  // the most basic first
#undef APC_ISA_ENTRY
constexpr int kNumIsas = int(sizeof(kIsas) / sizeof(kIsas[0]));

bool isa_available(Isa isa);  // true if the processor and the operating system support it
Isa isa();                    // the instruction set in use: the fastest one available, until set_isa
bool set_isa(Isa isa);        // returns false, with no change, if it is not available
const char* isa_name(Isa isa);
const char* isa_product(Isa isa);  // word for its bfloat16 products: see instruction_sets.h

// Returns the table entry of the instruction set in use.
template <class Function>
Function for_isa(const Function (&entries)[kNumIsas]) {
    return entries[int(isa())];
}

#define APC_SHARED_KERNEL(function, name, kernels, ...) &kernels::function,
#define APC_ATTENTION_KERNEL(function, name, kernels, attention, ...) &attention::function,
#define APC_OWN_KERNEL(function, name, ...) &name::function,
// Return a kernel's function for the instruction set in use. APC_FOR_ISA_ATTENTION is for attention.
// APC_FOR_OWN_ISA is for the matrix product, which no two instruction sets share. APC_FOR_ISA is for all
// others.
#define APC_FOR_ISA(function) for_isa({APC_ISAS(APC_SHARED_KERNEL, function)})
#define APC_FOR_ISA_ATTENTION(function) for_isa({APC_ISAS(APC_ATTENTION_KERNEL, function)})
#define APC_FOR_OWN_ISA(function) for_isa({APC_ISAS(APC_OWN_KERNEL, function)})

}  // namespace apcbatch
