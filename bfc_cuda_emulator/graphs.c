/* Graphs: the nodes that a capture has put down, what is instantiated of them, and its launches.
 *
 * A launch queues the work of all nodes on one stream, in the order in which they were captured,
 * which is one of the orders that the edges allow. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

enum { AUTO_FREE_ON_LAUNCH = 1 };
enum { SAME = 0, TOPOLOGY_CHANGED = 2, TYPE_CHANGED = 3 };

/* -- sets of nodes ------------------------------------------------------------------------------ */

void nodes_clear(struct nodes *nodes)
{
    free(nodes->items);
    *nodes = (struct nodes){0};
}

static bool nodes_have(const struct nodes *nodes, const struct node *node)
{
    for (size_t i = 0; i < nodes->count; i++)
        if (nodes->items[i] == node)
            return true;
    return false;
}

static bool nodes_append(struct nodes *nodes, struct node *node)
{
    if (nodes->count == nodes->room) {
        size_t room = nodes->room ? nodes->room * 2 : 4;
        struct node **items = realloc(nodes->items, room * sizeof *items);
        if (!items)
            return false;
        nodes->items = items;
        nodes->room = room;
    }
    nodes->items[nodes->count++] = node;
    return true;
}

bool nodes_add(struct nodes *nodes, struct node *node)
{
    return nodes_have(nodes, node) || nodes_append(nodes, node);
}

bool nodes_add_all(struct nodes *nodes, const struct nodes *others)
{
    for (size_t i = 0; i < others->count; i++)
        if (!nodes_add(nodes, others->items[i]))
            return false;
    return true;
}

/* Marks the nodes, and all that come before them. A node stands behind its parents in the graph. */
void nodes_mark(struct graph *graph, const struct nodes *last)
{
    for (size_t i = 0; i < graph->nodes.count; i++)
        graph->nodes.items[i]->marked = false;
    for (size_t i = 0; i < last->count; i++)
        last->items[i]->marked = true;
    for (size_t i = graph->nodes.count; i-- > 0;) {
        const struct node *node = graph->nodes.items[i];
        for (size_t j = 0; node->marked && j < node->parents.count; j++)
            node->parents.items[j]->marked = true;
    }
}

/* -- what graphs and what was instantiated of them hold ------------------------------------------ */

/* A user's object goes once the lock is free: its destructor takes locks of its own. */
static void object_release(struct object *object, unsigned count)
{
    object->references -= count < object->references ? count : object->references;
    if (object->references || object->state != ALIVE)
        return;
    object->state = DEAD;
    object->next = machine.dying;
    machine.dying = object;
}

void objects_destroy(void)
{
    machine_lock();
    while (machine.dying) {
        struct object *object = machine.dying;
        machine.dying = object->next;
        machine_unlock();
        object->destroy(object->pointer);
        machine_lock();
    }
    machine_unlock();
}

void belongings_release(struct belongings *belongings)
{
    if (!belongings || --belongings->users)
        return;
    for (size_t i = 0; i < belongings->addresses; i++) {
        struct region *region = regions_find(&machine.regions, belongings->address[i]);
        if (region && region->of_graph && region->address == belongings->address[i])
            region_free(region, DEAD);
    }
    for (size_t i = 0; i < belongings->objects; i++)
        object_release(belongings->object[i].object, belongings->object[i].count);
    free(belongings->address);
    free(belongings->object);
    free(belongings);
}

static bool own_memory(struct belongings *belongings, uint64_t address)
{
    size_t bytes = (belongings->addresses + 1) * sizeof *belongings->address;
    uint64_t *list = realloc(belongings->address, bytes);
    if (!list)
        return false;
    belongings->address = list;
    list[belongings->addresses++] = address;
    return true;
}

/* -- graphs -------------------------------------------------------------------------------------- */

struct graph *graph_new(void)
{
    struct graph *graph = slab_take(&machine.graphs);
    if (!graph)
        return NULL;
    graph->belongings = calloc(1, sizeof *graph->belongings);
    if (!graph->belongings) {
        graph->state = DEAD;
        return NULL;
    }
    graph->belongings->users = 1;
    return graph;
}

void graph_gone(struct graph *graph, enum state state)
{
    for (size_t i = 0; i < graph->nodes.count; i++) {
        nodes_clear(&graph->nodes.items[i]->parents);
        graph->nodes.items[i]->state = state;
    }
    nodes_clear(&graph->nodes);
    belongings_release(graph->belongings);
    graph->belongings = NULL;
    graph->state = state;
}

static int type_of(enum action action)
{
    static const int types[] = {[LAUNCH] = 0, [COPY] = 1,  [FILL] = 2,   [CALL_HOST] = 3,
                                [WAIT] = 6,   [RECORD] = 7, [ALLOC] = 10, [FREE] = 11};
    return types[action];
}

/* Adds a copy of the work, behind the parents. */
struct node *graph_add(struct graph *graph, const struct work *work, const struct nodes *parents)
{
    struct node *node = slab_take(&machine.nodes);
    if (!node)
        return NULL;
    node->graph = graph;
    node->type = type_of(work->action);
    node->work = *work;
    if (nodes_add_all(&node->parents, parents) && nodes_append(&graph->nodes, node) &&
        (work->action != ALLOC || own_memory(graph->belongings, work->to)))
        return node;
    nodes_clear(&node->parents);
    node->state = DEAD;
    return NULL;
}

/* Is there a node of the graph that does this to the address? */
bool graph_has(const struct graph *graph, enum action action, uint64_t address)
{
    for (size_t i = 0; i < graph->nodes.count; i++)
        if (graph->nodes.items[i]->work.action == action &&
            graph->nodes.items[i]->work.to == address)
            return true;
    return false;
}

static CUresult find(struct call *call, struct slab *slab, const void *handle, void **out)
{
    *out = slab_find(slab, handle);
    enum state state = *out ? *(enum state *)*out : UNUSED;
    if (state == ALIVE)
        return CUDA_SUCCESS;
    if (state != STALE)
        complain("%s: 0x%llx %s", call->name, (unsigned long long)NUMBER(handle),
                 state == UNUSED ? "is no such thing" : "was destroyed");
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult find_graph(struct call *call, CUgraph handle, struct graph **out)
{
    return find(call, &machine.graphs, handle, (void **)out);
}

static CUresult find_exec(struct call *call, CUgraphExec handle, struct exec **out)
{
    return find(call, &machine.execs, handle, (void **)out);
}

static bool is_stale(const struct slab *slab, const void *handle)
{
    const enum state *state = slab_find((struct slab *)slab, handle);
    return state && *state == STALE;
}

static bool is_captured_into(const struct graph *graph)
{
    for (size_t i = 0; i < machine.captures; i++)
        if (machine.capture_list[i]->graph == graph)
            return true;
    return false;
}

API cuGraphDestroy(CUgraph handle)
{
    struct call call = CALL("cuGraphDestroy");
    struct graph *graph = NULL;
    BEGIN(call, STARTED);
    if (is_stale(&machine.graphs, handle))
        return emulator_end(&call, CUDA_SUCCESS);
    CUresult result = find_graph(&call, handle, &graph);
    if (!result && is_captured_into(graph))
        result = CUDA_ERROR_ILLEGAL_STATE;
    if (!result)
        graph_gone(graph, DEAD);
    return emulator_end(&call, result);
}

/* Writes a list out as the driver does: without room for it, its length; else what fits. */
static void give_nodes(const struct nodes *nodes, CUgraphNode *out, size_t *count)
{
    size_t room = *count;
    *count = nodes->count;
    if (!out)
        return;
    for (size_t i = 0; i < room; i++)
        out[i] = i < nodes->count ? nodes->items[i] : NULL;
    *count = nodes->count < room ? nodes->count : room;
}

API cuGraphGetNodes(CUgraph handle, CUgraphNode *out, size_t *count)
{
    struct call call = CALL("cuGraphGetNodes");
    struct graph *graph = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_graph(&call, handle, &graph);
    if (!result)
        give_nodes(&graph->nodes, out, count);
    return emulator_end(&call, result);
}

API cuGraphGetRootNodes(CUgraph handle, CUgraphNode *out, size_t *count)
{
    struct call call = CALL("cuGraphGetRootNodes");
    struct graph *graph = NULL;
    struct nodes roots = {0};
    BEGIN(call, STARTED);
    CUresult result = find_graph(&call, handle, &graph);
    for (size_t i = 0; !result && i < graph->nodes.count; i++)
        if (!graph->nodes.items[i]->parents.count)
            nodes_append(&roots, graph->nodes.items[i]);
    if (!result)
        give_nodes(&roots, out, count);
    nodes_clear(&roots);
    return emulator_end(&call, result);
}

static void plain_edges(struct edge *edges, size_t count)
{
    if (edges)
        memset(edges, 0, count * sizeof *edges);
}

API cuGraphGetEdges_v2(CUgraph handle, CUgraphNode *from, CUgraphNode *to, struct edge *edges,
                       size_t *count)
{
    struct call call = CALL("cuGraphGetEdges");
    struct graph *graph = NULL;
    struct nodes begins = {0}, ends = {0};
    BEGIN(call, STARTED);
    CUresult result = find_graph(&call, handle, &graph);
    for (size_t i = 0; !result && i < graph->nodes.count; i++)
        for (size_t j = 0; j < graph->nodes.items[i]->parents.count; j++) {
            nodes_append(&begins, graph->nodes.items[i]->parents.items[j]);
            nodes_append(&ends, graph->nodes.items[i]);
        }
    size_t room = result ? 0 : *count;
    if (!result) {
        give_nodes(&begins, from, count);
        give_nodes(&ends, to, to ? &room : count);
        plain_edges(edges, from ? *count : 0);
    }
    nodes_clear(&begins);
    nodes_clear(&ends);
    return emulator_end(&call, result);
}

API cuGraphGetEdges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    return cuGraphGetEdges_v2(handle, from, to, NULL, count);
}

static CUresult find_node(struct call *call, CUgraphNode handle, struct node **out)
{
    return find(call, &machine.nodes, handle, (void **)out);
}

API cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode *out, struct edge *edges,
                                  size_t *count)
{
    struct call call = CALL("cuGraphNodeGetDependencies");
    struct node *node = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_node(&call, handle, &node);
    if (!result) {
        give_nodes(&node->parents, out, count);
        plain_edges(edges, out ? *count : 0);
    }
    return emulator_end(&call, result);
}

API cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode *out, size_t *count)
{
    return cuGraphNodeGetDependencies_v2(handle, out, NULL, count);
}

API cuGraphNodeGetDependentNodes_v2(CUgraphNode handle, CUgraphNode *out, struct edge *edges,
                                    size_t *count)
{
    struct call call = CALL("cuGraphNodeGetDependentNodes");
    struct node *node = NULL;
    struct nodes children = {0};
    BEGIN(call, STARTED);
    CUresult result = find_node(&call, handle, &node);
    for (size_t i = 0; !result && i < node->graph->nodes.count; i++)
        if (nodes_have(&node->graph->nodes.items[i]->parents, node))
            nodes_append(&children, node->graph->nodes.items[i]);
    if (!result) {
        give_nodes(&children, out, count);
        plain_edges(edges, out ? *count : 0);
    }
    nodes_clear(&children);
    return emulator_end(&call, result);
}

API cuGraphNodeGetDependentNodes(CUgraphNode handle, CUgraphNode *out, size_t *count)
{
    return cuGraphNodeGetDependentNodes_v2(handle, out, NULL, count);
}

API cuGraphNodeGetType(CUgraphNode handle, int *type)
{
    struct call call = CALL("cuGraphNodeGetType");
    struct node *node = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_node(&call, handle, &node);
    if (!result)
        *type = node->type;
    return emulator_end(&call, result);
}

/* -- what is instantiated ------------------------------------------------------------------------ */

static bool take_works(struct exec *exec, const struct graph *graph)
{
    struct work *works = calloc(graph->nodes.count + 1, sizeof *works);
    if (!works)
        return false;
    for (size_t i = 0; i < graph->nodes.count; i++)
        works[i] = graph->nodes.items[i]->work;
    free(exec->works);
    exec->works = works;
    exec->count = graph->nodes.count;
    graph->belongings->users++;
    belongings_release(exec->belongings);
    exec->belongings = graph->belongings;
    return true;
}

void exec_gone(struct exec *exec, enum state state)
{
    record_release(exec->finished);
    exec->finished = NULL;
    free(exec->works);
    exec->works = NULL;
    belongings_release(exec->belongings);
    exec->belongings = NULL;
    exec->state = state;
}

static CUresult instantiate(struct call *call, CUgraphExec *out, CUgraph handle, uint64_t flags)
{
    struct graph *graph = NULL;
    BEGIN(*call, CONTEXT);
    CUresult result = out ? find_graph(call, handle, &graph) : CUDA_ERROR_INVALID_VALUE;
    if (!result && is_captured_into(graph))
        result = CUDA_ERROR_ILLEGAL_STATE;
    if (result)
        return emulator_end(call, result);
    struct exec *exec = slab_take(&machine.execs);
    if (!exec || !take_works(exec, graph)) {
        if (exec)
            exec->state = DEAD;
        return emulator_end(call, CUDA_ERROR_OUT_OF_MEMORY);
    }
    exec->flags = flags;
    *out = exec;
    return emulator_end(call, CUDA_SUCCESS);
}

API cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    struct call call = CALL("cuGraphInstantiate");
    return instantiate(&call, out, graph, flags);
}

API cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *failed, char *text,
                          size_t room)
{
    struct call call = CALL("cuGraphInstantiate");
    if (failed)
        *failed = NULL;
    if (text && room)
        *text = 0;
    return instantiate(&call, out, graph, 0);
}

struct instantiation {
    uint64_t flags;
    CUstream upload;
    CUgraphNode failed;
    int result;
};

API cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, struct instantiation *wanted)
{
    struct call call = CALL("cuGraphInstantiateWithParams");
    CUresult result = instantiate(&call, out, graph, wanted->flags);
    wanted->failed = NULL;
    wanted->result = result ? 1 : 0;
    return result;
}

API cuGraphExecGetFlags(CUgraphExec handle, uint64_t *flags)
{
    struct call call = CALL("cuGraphExecGetFlags");
    struct exec *exec = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_exec(&call, handle, &exec);
    if (!result)
        *flags = exec->flags;
    return emulator_end(&call, result);
}

API cuGraphExecDestroy(CUgraphExec handle)
{
    struct call call = CALL("cuGraphExecDestroy");
    struct exec *exec = NULL;
    BEGIN(call, STARTED);
    if (is_stale(&machine.execs, handle))
        return emulator_end(&call, CUDA_SUCCESS);
    CUresult result = find_exec(&call, handle, &exec);
    if (!result)
        exec_gone(exec, DEAD);
    return emulator_end(&call, result);
}

struct update {
    int result;
    CUgraphNode failed, failed_from;
};

API cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph graph_handle, struct update *outcome)
{
    struct call call = CALL("cuGraphExecUpdate");
    struct exec *exec = NULL;
    struct graph *graph = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_exec(&call, handle, &exec);
    if (!result)
        result = find_graph(&call, graph_handle, &graph);
    if (result)
        return emulator_end(&call, result);
    struct update found = {SAME, NULL, NULL};
    if (graph->nodes.count != exec->count)
        found.result = TOPOLOGY_CHANGED;
    for (size_t i = 0; !found.result && i < exec->count; i++)
        if (graph->nodes.items[i]->work.action != exec->works[i].action)
            found = (struct update){TYPE_CHANGED, graph->nodes.items[i], NULL};
    if (outcome)
        *outcome = found;
    if (found.result)
        result = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    else if (!take_works(exec, graph))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    return emulator_end(&call, result);
}

static struct region *memory_of(const struct work *work)
{
    struct region *region = regions_find(&machine.regions, work->to);
    return region && region->address == work->to && region->of_graph ? region : NULL;
}

static bool frees(const struct exec *exec, uint64_t address)
{
    for (size_t i = 0; i < exec->count; i++)
        if (exec->works[i].action == FREE && exec->works[i].to == address)
            return true;
    return false;
}

/* Memory that an earlier launch has left allocated must be freed before the next. */
static CUresult check_memory(const struct exec *exec)
{
    for (size_t i = 0; i < exec->count; i++) {
        const struct work *work = &exec->works[i];
        struct region *region = work->action == ALLOC ? memory_of(work) : NULL;
        if (work->action == ALLOC && !region)
            return CUDA_ERROR_INVALID_VALUE;
        if (region && region->left && !(exec->flags & AUTO_FREE_ON_LAUNCH))
            return CUDA_ERROR_INVALID_VALUE;
        if (region)
            region->left = !frees(exec, work->to);
    }
    return CUDA_SUCCESS;
}

/* A graph does not keep the events that its nodes name. The manual leaves open what a launch does
 * once one was destroyed; here it is refused, like each other call with such an event. */
static CUresult check_events(struct call *call, const struct work *works, size_t count)
{
    struct event *event;
    for (size_t i = 0; i < count; i++)
        if (works[i].event && event_find(call, works[i].event, &event))
            return CUDA_ERROR_INVALID_HANDLE;
    return CUDA_SUCCESS;
}

/* An event of a node is recorded, or waited for, anew at each launch. */
static bool fill_in(struct work *work)
{
    struct event *event = work->event;
    if (work->action == RECORD) {
        struct record *mark = calloc(1, sizeof *mark);
        if (!mark)
            return false;
        record_release(event->record);
        mark->users = 1;
        event->record = mark;
    }
    if (work->action == RECORD || work->action == WAIT) {
        work->record = event->record;
        if (work->record)
            work->record->users++;
        else
            work->action = LAUNCH; /* nothing to wait for */
    }
    return true;
}

/* A mark that the stream waits for, or that it sets. */
static CUresult queue_mark(struct call *call, enum action action, struct record *mark,
                           struct stream *stream)
{
    struct work *work = work_new(call, action);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->record = mark;
    mark->users++;
    return work_queue(work, stream);
}

/* What was instantiated once does not run twice at a time. */
static CUresult after_the_last_launch(struct call *call, struct exec *exec, struct stream *stream)
{
    return exec->finished ? queue_mark(call, WAIT, exec->finished, stream) : CUDA_SUCCESS;
}

static CUresult mark_the_end(struct call *call, struct exec *exec, struct stream *stream)
{
    struct record *mark = calloc(1, sizeof *mark);
    if (!mark)
        return CUDA_ERROR_OUT_OF_MEMORY;
    mark->users = 1;
    record_release(exec->finished);
    exec->finished = mark;
    return queue_mark(call, RECORD, mark, stream);
}

static CUresult launch(struct call *call, struct exec *exec, struct stream *stream)
{
    CUresult result = check_events(call, exec->works, exec->count);
    if (!result)
        result = check_memory(exec);
    if (!result)
        result = after_the_last_launch(call, exec, stream);
    for (size_t i = 0; !result && i < exec->count; i++) {
        struct work *work = malloc(sizeof *work);
        if (!work)
            return CUDA_ERROR_OUT_OF_MEMORY;
        *work = exec->works[i];
        if (!fill_in(work)) {
            free(work);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        work->belongings = exec->belongings;
        work->belongings->users++;
        result = work_queue(work, stream);
    }
    return result ? result : mark_the_end(call, exec, stream);
}

API cuGraphLaunch(CUgraphExec handle, CUstream stream_handle)
{
    struct call call = CALL("cuGraphLaunch", .stream = NUMBER(stream_handle));
    struct exec *exec = NULL;
    struct stream *stream = NULL;
    bool taken = false;
    BEGIN(call, STARTED);
    CUresult result = find_exec(&call, handle, &exec);
    if (!result)
        result = stream_resolve(&call, stream_handle, &stream);
    if (!result)
        result = capture_enter(stream, &taken);
    if (!result && taken)
        result = CUDA_ERROR_NOT_SUPPORTED; /* graphs within graphs are not emulated */
    return emulator_end(&call, result ? result : launch(&call, exec, stream));
}

API cuGraphUpload(CUgraphExec handle, CUstream stream_handle)
{
    struct call call = CALL("cuGraphUpload", .stream = NUMBER(stream_handle));
    struct exec *exec = NULL;
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_exec(&call, handle, &exec);
    return emulator_end(&call, result ? result : stream_resolve(&call, stream_handle, &stream));
}

/* -- objects of users ---------------------------------------------------------------------------- */

API cuUserObjectCreate(struct object **out, void *pointer, CUhostFn destroy, unsigned count,
                       unsigned flags)
{
    struct call call = CALL("cuUserObjectCreate");
    (void)flags;
    BEGIN(call, STARTED);
    struct object *object = out && destroy && count ? slab_take(&machine.objects) : NULL;
    if (!object)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    object->pointer = pointer;
    object->destroy = destroy;
    object->references = count;
    *out = object;
    return emulator_end(&call, CUDA_SUCCESS);
}

static CUresult find_object(struct call *call, struct object *handle, struct object **out)
{
    return find(call, &machine.objects, handle, (void **)out);
}

API cuUserObjectRetain(struct object *handle, unsigned count)
{
    struct call call = CALL("cuUserObjectRetain");
    struct object *object = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_object(&call, handle, &object);
    if (!result)
        object->references += count;
    return emulator_end(&call, result);
}

API cuUserObjectRelease(struct object *handle, unsigned count)
{
    struct call call = CALL("cuUserObjectRelease");
    struct object *object = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_object(&call, handle, &object);
    if (!result)
        object_release(object, count);
    return emulator_end(&call, result);
}

enum { MOVE_REFERENCES = 1 };

API cuGraphRetainUserObject(CUgraph graph_handle, struct object *handle, unsigned count,
                            unsigned flags)
{
    struct call call = CALL("cuGraphRetainUserObject");
    struct graph *graph = NULL;
    struct object *object = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_graph(&call, graph_handle, &graph);
    if (!result)
        result = find_object(&call, handle, &object);
    if (result)
        return emulator_end(&call, result);
    struct belongings *belongings = graph->belongings;
    struct held *list =
        realloc(belongings->object, (belongings->objects + 1) * sizeof *belongings->object);
    if (!list)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    belongings->object = list;
    list[belongings->objects++] = (struct held){object, count};
    if (!(flags & MOVE_REFERENCES))
        object->references += count;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuGraphReleaseUserObject(CUgraph graph_handle, struct object *handle, unsigned count)
{
    struct call call = CALL("cuGraphReleaseUserObject");
    struct graph *graph = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_graph(&call, graph_handle, &graph);
    for (size_t i = 0; !result && i < graph->belongings->objects; i++) {
        struct held *held = &graph->belongings->object[i];
        if (held->object != handle || held->count < count)
            continue;
        held->count -= count;
        object_release(held->object, count);
        return emulator_end(&call, CUDA_SUCCESS);
    }
    return emulator_end(&call, result ? result : CUDA_ERROR_INVALID_VALUE);
}

/* -- the machine is made anew -------------------------------------------------------------------- */

void graphs_reset(void)
{
    for (size_t i = 0; i < machine.execs.high; i++) {
        struct exec *exec = (struct exec *)(machine.execs.base + i * machine.execs.size);
        if (exec->state == ALIVE)
            exec_gone(exec, STALE);
    }
    for (size_t i = 0; i < machine.graphs.high; i++) {
        struct graph *graph = (struct graph *)(machine.graphs.base + i * machine.graphs.size);
        if (graph->state == ALIVE)
            graph_gone(graph, STALE);
    }
}
