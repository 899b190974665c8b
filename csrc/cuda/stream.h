// The stream that kernels are started on, for those who do not include CUDA's headers.
#pragma once

typedef struct CUstream_st* cudaStream_t;
