/* The C face of slurm-ft's native half: one set of functions, three libraries that have it.
 *
 *   libslurm_ft_host.so   memfd memory and shared-memory collectives, no GPU
 *   libslurm_ft_cuda.so   NVIDIA: driver API and NCCL, both opened at run time
 *   libslurm_ft_rocm.so   AMD: HIP and RCCL, both opened at run time
 *
 * Every function returns a status. A status above SFT_IN_PROGRESS comes with a sentence in sft_last_error(), which
 * belongs to the calling thread. No exception leaves the library, and a handle that is 0, made up or closed gives
 * SFT_BAD_HANDLE. What the caller owns: each handle until its close, each file descriptor that a function gives out,
 * each buffer passed in until the operation that uses it has finished.
 */
#ifndef SLURM_FT_NATIVE_H
#define SLURM_FT_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SFT_ABI 1
#define SFT_ID_BYTES 128

#define SFT_API __attribute__((visibility("default")))

enum sft_status {
    SFT_OK = 0,
    SFT_IN_PROGRESS = 1, /* not an error: ask again */
    SFT_INVALID = 2,     /* an argument is wrong */
    SFT_BAD_HANDLE = 3,  /* never given out, or closed */
    SFT_UNSUPPORTED = 4, /* this library, driver or device cannot do it */
    SFT_ABSENT = 5,      /* a library or a device is not there */
    SFT_NO_MEMORY = 6,
    SFT_TIMEOUT = 7,     /* not finished within the time given; it still runs */
    SFT_REMOTE = 8,      /* a peer died, left or aborted */
    SFT_ABORTED = 9,     /* this communicator was aborted here */
    SFT_SYSTEM = 10,     /* a system call failed */
    SFT_DRIVER = 11,     /* a CUDA or HIP call failed */
    SFT_COLLECTIVE = 12, /* an NCCL or RCCL call failed */
    SFT_INTERNAL = 13
};

enum sft_feature {
    SFT_FEATURE_MEMORY = 1, /* memory that can be exported as a file descriptor */
    SFT_FEATURE_DMABUF = 2,
    SFT_FEATURE_COLLECTIVES = 4,
    SFT_FEATURE_SPLIT = 8,
    SFT_FEATURE_SHRINK = 16
};

/* NCCL's own numbers. */
enum sft_type {
    SFT_INT8 = 0,
    SFT_UINT8 = 1,
    SFT_INT32 = 2,
    SFT_UINT32 = 3,
    SFT_INT64 = 4,
    SFT_UINT64 = 5,
    SFT_FLOAT16 = 6,
    SFT_FLOAT32 = 7,
    SFT_FLOAT64 = 8,
    SFT_BFLOAT16 = 9
};
enum sft_reduction { SFT_SUM = 0, SFT_PRODUCT = 1, SFT_MAX = 2, SFT_MIN = 3 };

enum sft_memory_flag {
    SFT_POPULATE = 1 /* host: take all pages now, so that a lack of memory is an error and no signal */
};

typedef struct sft_device_info {
    char name[128];
    char bus_id[32]; /* as in 0000:c1:00.0 */
    uint64_t bytes;  /* memory of the device */
    uint64_t granularity;
    uint32_t features; /* sft_feature bits of this device */
} sft_device_info;

typedef struct sft_memory_info {
    uint64_t address;
    uint64_t bytes;    /* as asked for */
    uint64_t reserved; /* rounded up to the device's granularity */
    int32_t device;
    int32_t imported;
} sft_memory_info;

/* --- the library --- */

SFT_API int sft_abi(void);
SFT_API const char* sft_platform(void); /* "host", "cuda" or "rocm" */
/* Copies the calling thread's last error (cut to fit, always ended by a zero byte) and returns its status. */
SFT_API int sft_last_error(char* text, size_t size);
/* Finds and opens the vendor's libraries: what the process has loaded already, else the versioned name. May be
 * repeated: a failure is not remembered. */
SFT_API int sft_open(void);
SFT_API int sft_features(uint32_t* features);
/* driver: CUDA as 13000 (13.0), HIP as 70200000 (7.2); collectives: as 22707 (2.27.7); 0 when absent. */
SFT_API int sft_versions(int* driver, int* collectives);
/* Lines of text: which file each part came from, or why it is absent. */
SFT_API int sft_describe(char* text, size_t size);

/* --- devices --- */

SFT_API int sft_device_count(int* count);
SFT_API int sft_device(int device, sft_device_info* info);                      /* creates no context */
SFT_API int sft_device_free(int device, uint64_t* free_bytes, uint64_t* bytes); /* creates a context on a GPU */

/* --- memory that outlives its process --- */

SFT_API int sft_memory_create(int device, uint64_t bytes, uint32_t flags, uint64_t* memory);
/* fd stays the caller's, and may be closed as soon as this returns. */
SFT_API int sft_memory_import(int device, int fd, uint64_t bytes, uint64_t* memory);
/* A new descriptor of the same memory, close-on-exec. The memory lives as long as any of them. */
SFT_API int sft_memory_export(uint64_t memory, int* fd);
SFT_API int sft_memory_info_of(uint64_t memory, sft_memory_info* info);
SFT_API int sft_memory_write(uint64_t memory, uint64_t offset, const void* source, uint64_t bytes);
SFT_API int sft_memory_read(uint64_t memory, uint64_t offset, void* target, uint64_t bytes);
/* Sets an aligned 32-bit word in the order of the stream (0: a stream of the library's own, waited for). */
SFT_API int sft_memory_flag(uint64_t memory, uint64_t offset, uint32_t value, uint64_t stream);
SFT_API int sft_memory_close(uint64_t memory);
/* A dma-buf of the whole allocation in which address lies, and where in it address is. */
SFT_API int sft_dmabuf(int device, uint64_t address, uint64_t bytes, int* fd, uint64_t* offset, uint64_t* whole);

/* --- collectives that can be aborted --- */

SFT_API int sft_comm_id(uint8_t id[SFT_ID_BYTES]);
/* Returns at once. sft_comm_state says SFT_IN_PROGRESS until all ranks are there. */
SFT_API int sft_comm_create(int device, const uint8_t id[SFT_ID_BYTES], int rank, int ranks, uint64_t* comm);
SFT_API int sft_comm_state(uint64_t comm);
/* The same, but gives up with SFT_TIMEOUT after so many milliseconds. */
SFT_API int sft_comm_wait(uint64_t comm, int milliseconds);
/* Both start the operation and return. stream: a CUDA or HIP stream, 0 for one of the library's own. */
SFT_API int sft_comm_all_reduce(uint64_t comm, const void* send, void* receive, uint64_t count, int type, int reduction,
                                uint64_t stream);
SFT_API int sft_comm_broadcast(uint64_t comm, void* buffer, uint64_t count, int type, int root, uint64_t stream);
/* Ranks of one colour form a new communicator, ordered by key. A colour of -1 takes part and gets no communicator (0).
 */
SFT_API int sft_comm_split(uint64_t comm, int colour, int key, uint64_t* child);
/* All ranks but the excluded ones, in their order. Every one that stays passes the same list. May follow an error. */
SFT_API int sft_comm_shrink(uint64_t comm, const int* excluded, int count, uint64_t* child);
/* Ends what is running. SFT_TIMEOUT: the vendor's library hangs in its own abort; the process has to end. */
SFT_API int sft_comm_abort(uint64_t comm, int milliseconds);
/* Finishes what is running and leaves, by an abort when that takes longer. The handle is gone in any case. */
SFT_API int sft_comm_close(uint64_t comm, int milliseconds);

#ifdef __cplusplus
}
#endif
#endif
