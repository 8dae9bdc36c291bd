/* NCCL on paper: the collectives that torch asks for, between the processes of one machine, through shared memory.

Each is over when its call returns, or at the end of the outermost group. Bytes really travel and numbers are summed (those
of 8 bits are not), so what ranks tell each other is right even where no kernel computes anything. A peer that does not
come within PAPER_NCCL_SECONDS (60) is an error, as NCCL's own time limit makes it one.
*/
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 16
#define SLOT_BYTES ((size_t)1 << 20)
#define MOST_OPERATIONS 4096

struct mailbox { atomic_int is_full; char bytes[SLOT_BYTES]; };
struct shared {
    atomic_int num_arrived, round;
    char slots[MOST_RANKS][SLOT_BYTES];
    struct mailbox mail[MOST_RANKS][MOST_RANKS]; /* [from][to] */
};
struct ncclComm { int rank, num_ranks, device, num_splits; ncclUniqueId id; struct shared *shared; atomic_int is_aborted; };

enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECEIVE };
struct operation {
    enum kind kind;
    const char *from;
    char *to;
    size_t count, done;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int peer; /* the root, of collectives that have one */
    ncclComm_t comm;
};
static __thread struct operation queue[MOST_OPERATIONS];
static __thread int num_queued, group_depth;

/* ---- meeting ---- */
static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}
static double patience_s(void) {
    const char *text = getenv("PAPER_NCCL_SECONDS");
    return text ? atof(text) : 60;
}
static int is_hopeless(ncclComm_t comm, double begin_s) {
    usleep(20);
    return atomic_load(&comm->is_aborted) || now_s() - begin_s > patience_s();
}
static ncclResult_t meet(ncclComm_t comm) {
    struct shared *shared = comm->shared;
    int round = atomic_load(&shared->round);
    if (atomic_fetch_add(&shared->num_arrived, 1) == comm->num_ranks - 1) {
        atomic_store(&shared->num_arrived, 0);
        atomic_store(&shared->round, round + 1);
        return ncclSuccess;
    }
    for (double begin_s = now_s(); atomic_load(&shared->round) == round;)
        if (is_hopeless(comm, begin_s)) return ncclRemoteError;
    return ncclSuccess;
}

/* ---- numbers ---- */
static size_t width(ncclDataType_t type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return widths[type];
}
static float of_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static uint16_t to_bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
#define ADD(T) for (size_t i = 0; i < count; i++) { T a = ((T *)sum)[i], b = ((const T *)more)[i]; \
    ((T *)sum)[i] = reduction == ncclProd ? a * b : reduction == ncclMax ? (a > b ? a : b) : reduction == ncclMin ? (a < b ? a : b) : a + b; }
static void add(void *sum, const void *more, size_t count, ncclDataType_t type, ncclRedOp_t reduction) {
    switch (type) {
    case ncclInt8: ADD(int8_t) break;
    case ncclUint8: ADD(uint8_t) break;
    case ncclInt32: ADD(int32_t) break;
    case ncclUint32: ADD(uint32_t) break;
    case ncclInt64: ADD(int64_t) break;
    case ncclUint64: ADD(uint64_t) break;
    case ncclFloat16: ADD(_Float16) break;
    case ncclFloat32: ADD(float) break;
    case ncclFloat64: ADD(double) break;
    case ncclBfloat16:
        for (size_t i = 0; i < count; i++) {
            uint16_t *into = (uint16_t *)sum + i;
            *into = to_bfloat16(of_bfloat16(*into) + of_bfloat16(((const uint16_t *)more)[i]));
        }
        break;
    default: break;
    }
}
#define DIVIDE(T) for (size_t i = 0; i < count; i++) ((T *)sum)[i] /= num_ranks;
static void divide(void *sum, size_t count, ncclDataType_t type, int num_ranks) {
    switch (type) {
    case ncclFloat16: DIVIDE(_Float16) break;
    case ncclFloat32: DIVIDE(float) break;
    case ncclFloat64: DIVIDE(double) break;
    case ncclInt32: DIVIDE(int32_t) break;
    case ncclInt64: DIVIDE(int64_t) break;
    case ncclBfloat16:
        for (size_t i = 0; i < count; i++) ((uint16_t *)sum)[i] = to_bfloat16(of_bfloat16(((uint16_t *)sum)[i]) / num_ranks);
        break;
    default: break;
    }
}

/* ---- collectives: in pieces of a slot, what each rank brings, and then what each takes ---- */
static ncclResult_t share(ncclComm_t comm, const char *brought, size_t size) {
    ncclResult_t result = meet(comm); /* nobody reads the last piece any more */
    if (result == ncclSuccess && brought) memcpy(comm->shared->slots[comm->rank], brought, size);
    return result == ncclSuccess ? meet(comm) : result;
}
static void sum_slots(const struct operation *each, char *to, size_t size) {
    size_t count = size / width(each->type);
    memcpy(to, each->comm->shared->slots[0], size);
    for (int rank = 1; rank < each->comm->num_ranks; rank++)
        add(to, each->comm->shared->slots[rank], count, each->type, each->reduction);
    if (each->reduction == ncclAvg) divide(to, count, each->type, each->comm->num_ranks);
}
/* `count` is of what one rank has of the other's: of all-gather's and the like, one part. */
static ncclResult_t collect(struct operation *each) {
    ncclComm_t comm = each->comm;
    size_t part = each->count * width(each->type);
    int is_in_parts = each->kind == REDUCE_SCATTER || each->kind == ALL_TO_ALL || each->kind == SCATTER;
    for (int turn = 0; turn < (is_in_parts ? comm->num_ranks : 1); turn++)
        for (size_t at = 0; at < part; at += SLOT_BYTES) {
            size_t size = part - at < SLOT_BYTES ? part - at : SLOT_BYTES;
            int is_root = comm->rank == each->peer, brings = (each->kind != BROADCAST && each->kind != SCATTER) || is_root;
            ncclResult_t result = share(comm, brings ? each->from + turn * part + at : NULL, size);
            if (result != ncclSuccess) return result;
            switch (each->kind) {
            case ALL_REDUCE: sum_slots(each, each->to + at, size); break;
            case REDUCE: if (is_root) sum_slots(each, each->to + at, size); break;
            case BROADCAST: memcpy(each->to + at, comm->shared->slots[each->peer], size); break;
            case REDUCE_SCATTER: if (comm->rank == turn) sum_slots(each, each->to + at, size); break;
            case SCATTER: if (comm->rank == turn) memcpy(each->to + at, comm->shared->slots[each->peer], size); break;
            default:
                if ((each->kind == ALL_TO_ALL && comm->rank != turn) || (each->kind == GATHER && !is_root)) break;
                for (int rank = 0; rank < comm->num_ranks; rank++)
                    memcpy(each->to + rank * part + at, comm->shared->slots[rank], size);
            }
        }
    return ncclSuccess;
}

/* ---- messages: a piece at a time into, or out of, the mailbox of the pair ---- */
static int post(struct operation *each) {
    size_t size = each->count * width(each->type) - each->done;
    struct mailbox *box = each->kind == SEND ? &each->comm->shared->mail[each->comm->rank][each->peer]
                                             : &each->comm->shared->mail[each->peer][each->comm->rank];
    if (!size || atomic_load(&box->is_full) != (each->kind == RECEIVE)) return 0;
    if (size > SLOT_BYTES) size = SLOT_BYTES;
    if (each->kind == SEND) memcpy(box->bytes, each->from + each->done, size);
    else memcpy(each->to + each->done, box->bytes, size);
    each->done += size;
    atomic_store(&box->is_full, each->kind == SEND);
    return 1;
}
static ncclResult_t run_messages(void) {
    double begin_s = now_s();
    for (;;) {
        int is_open = 0, has_moved = 0;
        uint32_t held[2] = {0, 0}; /* peers with an earlier message that is not yet through: theirs stay in order */
        for (int i = 0; i < num_queued; i++) {
            struct operation *each = &queue[i];
            if (each->kind < SEND || each->done == each->count * width(each->type)) continue;
            uint32_t bit = 1u << each->peer;
            is_open = 1;
            if (!(held[each->kind == SEND] & bit)) has_moved |= post(each);
            held[each->kind == SEND] |= bit;
        }
        if (!is_open) return ncclSuccess;
        if (has_moved) begin_s = now_s();
        else for (int i = 0; i < num_queued; i++)
            if (queue[i].kind >= SEND && is_hopeless(queue[i].comm, begin_s)) return ncclRemoteError;
    }
}
static ncclResult_t run_queue(void) {
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < num_queued && result == ncclSuccess; i++)
        if (queue[i].kind < SEND) result = collect(&queue[i]);
    if (result == ncclSuccess) result = run_messages();
    num_queued = 0;
    return result;
}
static ncclResult_t ask(struct operation wanted) {
    if (num_queued == MOST_OPERATIONS) return ncclInternalError;
    queue[num_queued++] = wanted;
    return group_depth ? ncclSuccess : run_queue();
}
ncclResult_t ncclGroupStart(void) { group_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return --group_depth ? ncclSuccess : run_queue(); }

#define TYPED const void *from, void *to, size_t count, ncclDataType_t type
#define WHERE ncclComm_t comm, cudaStream_t stream
#define OPERATION(KIND, REDUCTION, PEER) ask((struct operation){KIND, from, to, count, 0, type, REDUCTION, PEER, comm})
ncclResult_t ncclAllReduce(TYPED, ncclRedOp_t reduction, WHERE) { return OPERATION(ALL_REDUCE, reduction, 0); }
ncclResult_t ncclReduce(TYPED, ncclRedOp_t reduction, int root, WHERE) { return OPERATION(REDUCE, reduction, root); }
ncclResult_t ncclBroadcast(TYPED, int root, WHERE) { return OPERATION(BROADCAST, 0, root); }
ncclResult_t ncclBcast(void *to, size_t count, ncclDataType_t type, int root, WHERE) { const void *from = to; return OPERATION(BROADCAST, 0, root); }
ncclResult_t ncclAllGather(TYPED, WHERE) { return OPERATION(ALL_GATHER, 0, 0); }
ncclResult_t ncclReduceScatter(TYPED, ncclRedOp_t reduction, WHERE) { return OPERATION(REDUCE_SCATTER, reduction, 0); }
ncclResult_t ncclAlltoAll(TYPED, WHERE) { return OPERATION(ALL_TO_ALL, 0, 0); }
ncclResult_t ncclGather(TYPED, int root, WHERE) { return OPERATION(GATHER, 0, root); }
ncclResult_t ncclScatter(TYPED, int root, WHERE) { return OPERATION(SCATTER, 0, root); }
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, WHERE) { void *to = NULL; return OPERATION(SEND, 0, peer); }
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, WHERE) { const void *from = NULL; return OPERATION(RECEIVE, 0, peer); }

/* ---- communicators ---- */
static ncclResult_t open_comm(ncclComm_t *into, int num_ranks, ncclUniqueId id, int rank) {
    char path[64];
    unsigned long long words[2];
    if (num_ranks > MOST_RANKS) return ncclInvalidArgument;
    memcpy(words, id.internal, sizeof words);
    snprintf(path, sizeof path, "/dev/shm/paper-nccl-%016llx%016llx", words[0], words[1]);
    int file = open(path, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return ncclSystemError;
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED) return ncclSystemError;
    comm->rank = rank, comm->num_ranks = num_ranks, comm->id = id;
    cudaGetDevice(&comm->device);
    *into = comm;
    ncclResult_t result = meet(comm);
    if (rank == 0) unlink(path);
    return result;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    int file = open("/dev/urandom", O_RDONLY);
    ssize_t size = read(file, id->internal, sizeof id->internal);
    close(file);
    return size == sizeof id->internal ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank) { return open_comm(comm, num_ranks, id, rank); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t *config) { return open_comm(comm, num_ranks, id, rank); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int num_ranks, int rank, int num_ids, ncclUniqueId *ids, ncclConfig_t *config) { return open_comm(comm, num_ranks, ids[0], rank); }
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int num_devices, const int *devices) { return ncclInvalidUsage; }
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *into, ncclConfig_t *config) {
    int own[2] = {color, key}, all[MOST_RANKS][2], rank = 0, num_ranks = 0;
    ncclResult_t result = ncclAllGather(own, all, 2, ncclInt32, comm, NULL);
    ncclUniqueId id = comm->id;
    id.internal[0] ^= ++comm->num_splits, id.internal[1] ^= color;
    *into = NULL;
    for (int i = 0; i < comm->num_ranks; i++) {
        if (all[i][0] != color) continue;
        num_ranks++;
        rank += all[i][1] < key || (all[i][1] == key && i < comm->rank);
    }
    return result != ncclSuccess || color < 0 ? result : open_comm(into, num_ranks, id, rank);
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; } /* a watchdog may still look at it */
ncclResult_t ncclCommAbort(ncclComm_t comm) { atomic_store(&comm->is_aborted, 1); return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { *count = comm->num_ranks; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { *device = comm->device; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclMemAlloc(void **pointer, size_t size) { return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void *pointer) { cudaFree(pointer); return ncclSuccess; }
ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t error) { return error ? "an error of NCCL on paper" : "no error"; }
const char *ncclGetLastError(ncclComm_t comm) { return ""; }
