/* An emulated CUDA driver: one machine whose devices are address ranges of this process.
 *
 * core.c      the machine, its lock, the call log, injected faults, complaints
 * device.c    initialisation, devices and their attributes
 * context.c   primary and created contexts, the stack of each thread
 * memory.c    address ranges, regions, plain, managed and pinned memory
 * pools.c     stream-ordered memory
 * virtual.c   reserved addresses and the physical memory that is mapped to them
 * pointers.c  what is asked of an address
 * work.c      the queues of the streams and what runs when
 * streams.c   streams
 * captures.c  what streams put into graphs, and what may not be called meanwhile
 * graphs.c    graphs, and what is instantiated and launched of them
 * events.c    events
 * copies.c    copies and fills
 * kernels.c   libraries, modules and launches, which do nothing
 * table.c     cuGetProcAddress
 * ptds.c      the entry points of the per-thread default stream
 * stubs.c     entry points that exist but are not supported
 * controls.c  what tests steer it with: emu_*
 */
#ifndef EMULATOR_H
#define EMULATOR_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct pool *CUmemoryPool;
typedef struct graph *CUgraph;
typedef struct node *CUgraphNode;
typedef struct exec *CUgraphExec;
typedef void (*CUhostFn)(void *);
typedef void (*CUstreamCallback)(CUstream, CUresult, void *);

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
};

enum { MAX_DEVICES = 16, MAX_ATTRIBUTE = 256, MAX_STACK = 64, MAX_FAULTS = 64 };
enum { MAX_CAPTURES = 64, MAX_HIDDEN = 64, MAX_NAME = 64 };

struct location {
    int type, id;
};

struct access {
    struct location location;
    int flags;
};

enum { AT_DEVICE = 1, AT_HOST = 2, AT_HOST_NODE = 3 };

/* The three streams that a caller names without having created them. */
#define LEGACY_STREAM ((CUstream)(uintptr_t)1)
#define PER_THREAD_STREAM ((CUstream)(uintptr_t)2)

/* CLOSED: a stream that was destroyed with work left. STALE: lived when the machine was made anew;
 * freeing such a thing later is no mistake. */
enum state { UNUSED = 0, ALIVE, CLOSED, DEAD, STALE };

enum kind { DEVICE, MANAGED, HOST, REGISTERED, POOLED, MAPPED, IMPORTED };

/* Addresses of one kind of memory, given out upwards: a freed one is not seen again soon. */
/* Addresses. A search for free ones begins at `next`; `top` is behind the highest that were used. */
struct range {
    uint64_t base, next, top;
    size_t bytes;
};

struct region {
    enum state state;
    uint64_t address;
    size_t bytes;
    enum kind kind;
    int device;
    struct context *context;
    struct pool *pool;
    struct physical *physical;   /* MAPPED */
    uint64_t readable, writable; /* MAPPED: one bit a device, and one for the host */
    uint64_t id;
    unsigned flags;
    bool ready;   /* a stream-ordered allocation: its stream has come to it */
    bool freeing; /* a stream-ordered free is queued */
    bool of_graph; /* allocated by a node of a graph; ready between that node and its free */
    bool left;     /* of a graph: a launch has allocated it, and does not free it */
    bool synchronous, read_mostly;
    bool shared; /* its pages are in the device's file */
    int owner, opened;         /* IMPORTED: the process that it is of, and how often it is open */
    uint64_t id_there, skipped; /* IMPORTED: of the allocation there; where that begins */
    struct location preferred, prefetched; /* managed; type 0: nowhere */
};

/* A sorted set of address intervals. */
struct regions {
    struct region **items;
    size_t count, room;
};

struct device {
    size_t total, others, used;
    int attributes[MAX_ATTRIBUTE];
    struct range range;
    int file; /* of what other processes may open, or 0 */
    struct pool *pool; /* the one that cuMemAllocAsync takes */
};

struct context {
    enum state state;
    int device;
    bool primary;
    bool adoptable; /* nobody has released it since the machine was made */
    bool adopted;   /* held by a library that still has the handle from before */
    unsigned retained, flags;
    uint64_t id;
    uint64_t peers; /* one bit a device */
    struct stream *streams;
    struct stream *legacy;
    size_t limits[16];
};

/* What a wait, an event or a blocked caller looks at; shared, hence counted. */
struct record {
    int users;
    bool done;
    double time;
    struct mark *mark; /* of an event that other processes see; this is its record `number` */
    uint32_t number;
};

enum action { COPY, FILL, RECORD, WAIT, CALL_HOST, ALLOC, FREE, LAUNCH };

/* Of a copy in rows of `bytes` each. All is 0 where it is one run of bytes. */
struct rows {
    size_t height, depth, to_pitch, from_pitch, to_slice, from_slice;
};

struct work {
    struct work *next;
    struct stream *stream;
    uint64_t order;
    enum action action;
    bool running, cancelled;
    const char *name; /* of the entry point, for complaints */
    uint64_t to, from;
    unsigned to_how, from_how; /* TOUCH_... */
    size_t bytes;
    struct rows rows;
    void *staged; /* a source that was taken at once */
    unsigned unit, value;
    struct record *record;
    CUhostFn function;
    CUstreamCallback callback;
    CUstream handle; /* what the caller named the stream */
    void *argument;
    struct record *finished; /* set when a caller blocks on this piece */
    struct event *event;     /* of a node that records it, or waits for it */
    struct belongings *belongings; /* of the graph that was launched */
};

/* Nodes of one graph, each once. */
struct nodes {
    struct node **items;
    size_t count, room;
};

struct stream {
    enum state state;
    struct context *context;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t owner; /* the thread of a per-thread default stream */
    bool held, busy;
    struct work *head, *tail;
    struct stream *next;                  /* of the context */
    struct stream *next_busy, *prev_busy; /* with work queued */
    struct capture *capture;
    struct nodes terminals; /* what the next node that it captures depends on */
};

struct event {
    enum state state;
    struct context *context;
    unsigned flags;
    struct record *record;
    uint64_t captured; /* the number of the capture that it was last recorded in, or 0 */
    struct nodes nodes; /* the terminals of the stream at that moment */
    struct mark *mark;  /* that other processes see, too */
    bool is_foreign;    /* it was opened by its handle */
};

struct capture {
    uint64_t id;
    int mode;
    uint64_t thread;
    struct stream *origin;
    bool invalid;
    struct graph *graph;
    struct nodes left; /* the last nodes of streams that were destroyed: they have to be joined, too */
};

struct node {
    enum state state;
    struct graph *graph;
    int type;
    struct work work;
    struct nodes parents;
    bool marked;
};

/* An object of the user's that lives as long as the graphs which hold it. */
struct object {
    enum state state;
    void *pointer;
    CUhostFn destroy;
    unsigned references;
    struct object *next; /* of those whose destructor is to be called */
};

struct held {
    struct object *object;
    unsigned count;
};

/* Memory and objects of a graph, shared with what is instantiated of it and with its launches. */
struct belongings {
    int users;
    uint64_t *address;
    struct held *object;
    size_t addresses, objects;
};

struct graph {
    enum state state;
    struct nodes nodes; /* as they were added: parents before their children */
    struct belongings *belongings;
};

struct exec {
    enum state state;
    uint64_t flags;
    struct work *works;
    size_t count;
    struct belongings *belongings;
    struct record *finished; /* of the last launch: the next one waits for it, on whatever stream */
};

/* CUgraphEdgeData. All edges are plain here. */
struct edge {
    unsigned char from_port, to_port, type, reserved[5];
};

struct pool {
    enum state state;
    int device;
    int location; /* CUmemLocationType */
    int type;
    size_t reserved, reserved_high, used, used_high, limit;
    uint64_t threshold;
    int reuse[3];
    int handle_types;
    uint64_t access[MAX_DEVICES];
};

struct physical {
    enum state state;
    int device;
    size_t bytes, offset;
    int file; /* that it lies in: this process's, or that of another one */
    bool is_foreign;
    int handles, mappings;
    unsigned char properties[64];
};

/* Objects of one type at fixed places, used in turn: an old handle is still known as such. */
struct slab {
    char *base;
    size_t size, limit, cursor, high;
};

struct call {
    const char *name;
    uint64_t bytes, address, stream;
    struct context *context;
    bool locked, over; /* over: nothing is left to do */
};

struct logged {
    const char *name;
    uint64_t thread, bytes, address, stream;
    int result;
};

struct fault {
    char name[MAX_NAME];
    int error;
    long skip, left; /* left < 0: for ever */
    uint64_t above;
};

struct thread {
    uint64_t id, generation;
    int depth;
    int capture_mode;
    struct context *stack[MAX_STACK];
};

struct machine {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t generation;
    bool initialised, forked, host_worker;
    bool wanted; /* cuInit was called, on this machine or one before */
    int device_count, driver_version;
    int newest_known; /* cuGetProcAddress finds nothing that came later */
    double patience;
    size_t host_total, host_used;
    bool no_peers;
    bool rising; /* no address is used again soon */
    struct device devices[MAX_DEVICES];
    struct context primaries[MAX_DEVICES];
    struct pool default_pools[MAX_DEVICES + 2]; /* the last two: of the host, managed */
    struct range managed, host, reserved;
    struct regions regions, reservations, freed, freed_reservations;
    struct slab streams, events, pools, contexts, physicals, graphs, nodes, execs, objects;
    struct object *dying;
    struct stream *busy;
    uint64_t order, next_id;
    size_t captures;
    struct capture *capture_list[MAX_CAPTURES];
    struct logged *log;
    size_t logged, log_room;
    char **complaints;
    size_t complained;
    struct fault faults[MAX_FAULTS];
    size_t fault_count;
    char hidden[MAX_HIDDEN][MAX_NAME];
    size_t hidden_count;
};

extern struct machine machine;
extern size_t blocked_callers;
extern _Thread_local struct thread this_thread;

#define EXPORT __attribute__((visibility("default")))
#define API EXPORT CUresult
#define NO_NUMBER UINT64_MAX
#define CALL(entry, ...) \
    ((struct call){.name = entry, .bytes = NO_NUMBER, .address = NO_NUMBER, \
                   .stream = NO_NUMBER, ##__VA_ARGS__})
#define NUMBER(handle) ((uint64_t)(uintptr_t)(handle))

/* What an entry point asks for before it may do anything. */
enum {
    NOTHING = 0,
    STARTED = 1,           /* cuInit */
    CONTEXT = 2 | STARTED, /* a current context that is alive */
    UNSAFE = 4,            /* not while somebody captures */
    FREEING = 8,           /* success without effect if the address is from before a reset */
};

#define BEGIN(call, needs) \
    do { \
        CUresult begun = emulator_begin(&(call), needs); \
        if (begun || (call).over) \
            return emulator_end(&(call), begun); \
    } while (0)

/* core.c */
CUresult emulator_begin(struct call *call, int needs);
CUresult emulator_end(struct call *call, CUresult result);
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
void machine_start(void);
void machine_lock(void);
void machine_unlock(void);
void slab_open(struct slab *slab, size_t size, size_t limit);
void *slab_take(struct slab *slab);
void *slab_find(struct slab *slab, const void *handle);
struct thread *thread_now(void);
CUresult wait_until(struct call *call, bool (*ready)(const void *), const void *argument);

/* device.c */
bool device_known(int device);
void device_reset(int device, size_t total);
size_t device_free(int device);

/* context.c */
struct context *context_current(CUresult *why);
CUresult context_check(struct context *context);
void context_destroy(struct context *context, enum state state);

/* memory.c */
bool range_open(struct range *range, size_t bytes, uint64_t hint, bool accessible);
struct region *region_new(struct range *range, size_t bytes, size_t alignment, enum kind kind);
struct region *region_put(struct range *range, uint64_t address, size_t bytes, enum kind kind);
struct range *range_holding(uint64_t address);
void region_free(struct region *region, enum state state);
void pool_uncharge(struct region *region);
void reservation_free(struct region *region, enum state state);
void memory_reset(void);
bool was_stale(uint64_t address);
CUresult unknown_address(struct call *call, uint64_t address);
struct region *regions_find(const struct regions *set, uint64_t address);
struct region *regions_after(const struct regions *set, uint64_t address);
bool regions_insert(struct regions *set, struct region *region);
void regions_remove(struct regions *set, struct region *region);
bool regions_clear(const struct regions *set, uint64_t address, size_t bytes);
void *memory_at(uint64_t address);
size_t align_up(size_t bytes, size_t alignment);

/* pools.c */
void pools_reset(void);
void pool_commit(struct work *work);
void pool_finish(struct work *work);
void pools_trim_idle(int device);
size_t pools_give_back(int device, size_t wanted);

/* virtual.c */
void virtual_reset(void);
CUresult physical_find(struct call *call, uint64_t handle, struct physical **out);
int physical_export(const struct physical *physical);
struct physical *physical_import(int descriptor, int from);

/* sharing.c */
void mark_record(struct event *event, struct record *record);
void mark_reach(const struct record *record);
bool mark_is_awaited(const struct event *event);
CUresult mark_wait(struct call *call, const struct event *event);

/* work.c */
struct work *work_new(struct call *call, enum action action);
CUresult work_queue(struct work *work, struct stream *stream);
CUresult work_block(struct call *call, struct work *work, struct stream *stream);
void work_pump(void);
void work_drop(struct stream *stream);
bool work_pending(const struct stream *stream, uint64_t order);
bool work_uses(uint64_t address, size_t bytes);
CUresult wait_stream(struct call *call, struct stream *stream);
CUresult wait_context(struct call *call, struct context *context);
CUresult wait_device(struct call *call, int device);
CUresult wait_record(struct call *call, struct record *record);
void record_release(struct record *record);
double now(void);

/* streams.c */
CUresult stream_resolve(struct call *call, CUstream handle, struct stream **stream);
bool stream_blocking(const struct stream *stream);
void stream_close(struct stream *stream, enum state state);
struct stream *stream_special(struct context *context, CUstream handle);
void stream_gone(struct stream *stream, enum state state);

/* captures.c */
CUresult capture_forbids(struct thread *thread);
CUresult capture_forbids_waiting(const struct context *context);
CUresult capture_forbids_asking(const struct event *event);
CUresult capture_enter(struct stream *stream, bool *taken);
CUresult capture_forbids_stream(struct stream *stream);
CUresult capture_add(struct work *work, struct stream *stream);
CUresult capture_record(struct event *event, const struct stream *stream);
CUresult capture_wait(struct stream *stream, const struct event *event, bool *joined);
void capture_invalidate(struct capture *capture);
void capture_leave(struct stream *stream);
void captures_reset(void);

/* graphs.c */
void nodes_clear(struct nodes *nodes);
bool nodes_add(struct nodes *nodes, struct node *node);
bool nodes_add_all(struct nodes *nodes, const struct nodes *others);
void nodes_mark(struct graph *graph, const struct nodes *last);
struct graph *graph_new(void);
struct node *graph_add(struct graph *graph, const struct work *work, const struct nodes *parents);
bool graph_has(const struct graph *graph, enum action action, uint64_t address);
void graph_gone(struct graph *graph, enum state state);
void exec_gone(struct exec *exec, enum state state);
void belongings_release(struct belongings *belongings);
void objects_destroy(void);
void graphs_reset(void);

/* events.c */
CUresult event_find(struct call *call, CUevent handle, struct event **event);
struct capture *event_capture(const struct event *event);
void event_gone(struct event *event, enum state state);

/* copies.c */
enum { TOUCH_DEVICE = 1, TOUCH_WRITE = 2, TOUCH_NOW = 4 };
CUresult copy_check(const char *name, uint64_t address, size_t bytes, unsigned how, int device);
void copy_run(struct work *work);
size_t copy_reach_to(const struct work *work);
size_t copy_reach_from(const struct work *work);
CUresult copy_any(const char *name, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream,
                  bool block);
CUresult copy_in(const char *name, CUdeviceptr to, const void *from, size_t bytes, CUstream stream,
                 bool block);
CUresult copy_out(const char *name, void *to, CUdeviceptr from, size_t bytes, CUstream stream,
                  bool block);
CUresult copy_over(const char *name, CUdeviceptr to, CUdeviceptr from, size_t bytes,
                   CUstream stream);
CUresult copy_fill(const char *name, CUdeviceptr to, unsigned value, unsigned unit, size_t count,
                   CUstream stream);

/* controls.c */
bool name_hidden(const char *name);
void report_leaks(int status, void *unused);

#endif
