// The names of the structures behind pointers, for modules that pass them on. What looks inside one includes its header,
// too, so that a change of a header compiles those modules alone, and not all that know a pool.
#pragma once

namespace bfc {

class Bins;
class History;
class PageBitmap;
class PlanServer;
class PoolUsage;
class Timeline;
class Usage;
struct FreeChunk;
struct Gauge;
struct HistoryRecord;
struct PoolReserved;
struct TimelineRow;

}  // namespace bfc
