// Names that torch.utils.hipify leaves as they are. Where a later hipify maps one, its line here is harmless.
// tests/native/test_hipify.py holds this list against what is left over in the twins.
#pragma once

#ifdef USE_ROCM
#define cuDeviceTotalMem hipDeviceTotalMem
#define cuMemGetHandleForAddressRange hipMemGetHandleForAddressRange
#define CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD hipMemRangeHandleTypeDmaBufFd
#define CUmemRangeHandleType hipMemRangeHandleType
#define CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED hipDeviceAttributeVirtualMemoryManagementSupported
#endif
