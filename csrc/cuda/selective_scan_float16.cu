#include "scan_dispatch.cuh"

template void apcbatch::cuda::selective_scan_of<__half>(const ScanParams&, const Selection&, int,
                                                        cudaStream_t);
