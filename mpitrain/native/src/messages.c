/* The messages of an update: headers, a swap by two ranks, a ring. `comm/` has the same in Python, and says why. */
#include "native.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SPIN_SECONDS 3e-4
#define LONGEST_SLEEP_SECONDS 2e-4
#define MOST_IN_FLIGHT 4096

struct mpi mpi;

int64_t item_bytes(int64_t type) {
    return type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2;
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Memory that stays, grown where more is needed. NULL if there is none. */
void *scratch(struct session *session, scratch_t which, int64_t bytes) {
    if (session->scratch_bytes[which] < bytes || !session->scratch[which]) {
        free(session->scratch[which]);
        int64_t rounded = (bytes / 4096 + 1) * 4096; /* some for nothing, too */
        session->scratch[which] = aligned_alloc(64, (size_t)rounded);
        session->scratch_bytes[which] = session->scratch[which] ? rounded : 0;
    }
    return session->scratch[which];
}

static int done(handle *request, int *is_done) {
    int64_t status[32]; /* larger than MPI_Status of any library */
    return mpi.test(request, is_done, status);
}

/* As `comm/waiting.py`: a rank that waits does not take the processor from the one it waits for. */
static int wait_for(handle *request) {
    int is_done = 0, error = done(request, &is_done);
    if (error || is_done)
        return error;
    double start = now();
    while (!(error = done(request, &is_done)) && !is_done) {
        double waited = now() - start;
        if (waited < SPIN_SECONDS) {
            sched_yield();
            continue;
        }
        double seconds = waited / 8 < LONGEST_SLEEP_SECONDS ? waited / 8 : LONGEST_SLEEP_SECONDS;
        struct timespec pause = {0, (long)(seconds * 1e9)};
        nanosleep(&pause, NULL);
    }
    return error;
}

int gather_headers(struct session *session) {
    session->activity[POSITION]++;
    handle request = 0;
    int count = (int)session->header_bytes;
    int error = mpi.iallgather(session->mine, count, session->byte, session->all, count, session->byte, session->comm,
                               &request);
    return error ? error : wait_for(&request);
}

static int by_mpi(struct session *session, const void *source, void *target, int64_t type, int64_t size,
                  double factor) {
    int64_t item = item_bytes(type), most = session->largest_bytes / item;
    if (source != target)
        memcpy(target, source, (size_t)(size * item));
    session->activity[POSITION]++;
    handle kind = type == FLOAT64 ? session->float64 : session->float32;
    for (int64_t start = 0; start < size || start == 0; start += most) {
        int count = (int)(size - start < most ? size - start : most), error;
        void *piece = (char *)target + start * item;
        if (session->crowded) {
            handle request = 0;
            error = mpi.iallreduce(session->in_place, piece, count, kind, session->sum, session->comm, &request);
            if (!error)
                error = wait_for(&request);
        } else {
            error = mpi.allreduce(session->in_place, piece, count, kind, session->sum, session->comm);
        }
        if (error)
            return error;
    }
    if (factor != 1.0)
        scale(target, type, size, factor);
    return 0;
}

static int by_pair(struct session *session, const void *source, void *target, int64_t type, int64_t size,
                   double factor) {
    int64_t bytes = size * item_bytes(type);
    int other = 1 - (int)session->rank, error;
    void *received = scratch(session, ARRIVED, session->small_bytes);
    if (!received)
        return -1;
    handle receive = 0, send = 0;
    if ((error = mpi.irecv(received, (int)bytes, session->byte, other, 0, session->comm, &receive)) ||
        (error = mpi.isend(source, (int)bytes, session->byte, other, 0, session->comm, &send)) ||
        (error = wait_for(&receive)) || (error = wait_for(&send)))
        return error;
    if (session->rank == 0)
        add(target, source, received, type, size, factor);
    else
        add(target, received, source, type, size, factor);
    return 0;
}

/* One all-reduce around the ring, as `_Pass` of `comm/ring.py` has it. */
struct ring {
    struct session *session;
    const char *source;
    char *target, *arrived;
    int64_t type, item, size, chunk, segment, segments, window, messages;
    int64_t sent, sends_done, posted;
    double factor;
    handle sends[MOST_IN_FLIGHT], receives[MOST_IN_FLIGHT];
};

static void bounds(const struct ring *ring, int64_t message, int64_t back, int64_t *low, int64_t *high) {
    int64_t ranks = ring->session->size, step = message / ring->segments, segment = message % ring->segments;
    int64_t chunk = ((ring->session->rank - step - back) % ranks + ranks) % ranks;
    int64_t start = chunk * ring->chunk, end = start + ring->chunk < ring->size ? start + ring->chunk : ring->size;
    if (start >= end) {
        *low = *high = end < 0 ? 0 : end;
        return;
    }
    *low = start + segment * ring->segment < end ? start + segment * ring->segment : end;
    *high = *low + ring->segment < end ? *low + ring->segment : end;
}

static char *place(const struct ring *ring, int64_t message, int64_t low) {
    if (!ring->arrived || message >= ring->messages / 2)
        return ring->target + low * ring->item;
    return ring->arrived + message % ring->window * ring->segment * ring->item;
}

static int post(struct ring *ring, int64_t finished) {
    struct session *session = ring->session;
    int left = (int)((session->rank + session->size - 1) % session->size);
    while (ring->posted < ring->messages && ring->posted < finished + ring->window) {
        int64_t low, high;
        bounds(ring, ring->posted, 1, &low, &high);
        handle *request = &ring->receives[ring->posted % ring->window];
        *request = 0;
        int error = mpi.irecv(place(ring, ring->posted, low), (int)((high - low) * ring->item), session->byte, left, 0,
                              session->comm, request);
        if (error)
            return error;
        ring->posted++;
    }
    return 0;
}

static int send(struct ring *ring, int64_t finished) {
    struct session *session = ring->session;
    int right = (int)((session->rank + 1) % session->size);
    int64_t available = finished + ring->segments < ring->messages ? finished + ring->segments : ring->messages;
    while (ring->sent < available && ring->sent - ring->sends_done < ring->window) {
        int64_t low, high;
        bounds(ring, ring->sent, 0, &low, &high);
        const char *from = ring->sent < ring->segments ? ring->source : ring->target;
        handle *request = &ring->sends[ring->sent % ring->window];
        *request = 0;
        int error = mpi.isend(from + low * ring->item, (int)((high - low) * ring->item), session->byte, right, 0,
                              session->comm, request);
        if (error)
            return error;
        ring->sent++;
    }
    return 0;
}

static int around(struct ring *ring) {
    int error = 0, is_done = 1;
    for (int64_t message = 0; message < ring->messages; message++) {
        if ((error = post(ring, message)) || (error = send(ring, message)) ||
            (error = wait_for(&ring->receives[message % ring->window])))
            return error;
        ring->session->activity[MOVED]++;
        if (message < ring->messages / 2) {
            int64_t low, high;
            bounds(ring, message, 1, &low, &high);
            int is_last = message >= ring->messages / 2 - ring->segments;
            add(ring->target + low * ring->item, ring->source + low * ring->item, place(ring, message, low), ring->type,
                high - low, is_last ? ring->factor : 1.0);
        }
        for (is_done = 1; is_done && ring->sends_done < ring->sent; ring->sends_done += is_done) {
            is_done = 0;
            if ((error = done(&ring->sends[ring->sends_done % ring->window], &is_done)))
                return error;
        }
    }
    while (ring->sends_done < ring->messages) {
        if ((error = send(ring, ring->messages)) ||
            (error = wait_for(&ring->sends[ring->sends_done % ring->window])))
            return error;
        ring->sends_done++;
    }
    return 0;
}

static int by_ring(struct session *session, const void *source, void *target, int64_t type, int64_t size,
                   double factor) {
    int64_t item = item_bytes(type), ranks = session->size;
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return -1;
    ring->session = session, ring->source = source, ring->target = target;
    ring->type = type, ring->item = item, ring->size = size, ring->factor = factor;
    ring->chunk = (size + ranks - 1) / ranks;
    int64_t chunk = ring->chunk > 1 ? ring->chunk : 1;
    ring->segment = session->how[SEGMENT_BYTES] / item > 1 ? session->how[SEGMENT_BYTES] / item : 1;
    ring->segment = ring->segment < chunk ? ring->segment : chunk;
    ring->segments = ring->chunk > 0 ? (ring->chunk + ring->segment - 1) / ring->segment : 1;
    ring->window = session->how[WINDOW] < ring->segments ? session->how[WINDOW] : ring->segments;
    ring->window = ring->window < MOST_IN_FLIGHT ? ring->window : MOST_IN_FLIGHT;
    ring->messages = 2 * (ranks - 1) * ring->segments;
    int error = -1;
    if (source != target || (ring->arrived = scratch(session, ARRIVED, ring->window * ring->segment * item)))
        error = around(ring);
    free(ring);
    return error;
}

/* `target` becomes `factor` times the sum of all ranks' `source`, which may be `target`. -1: no memory; else MPI's code. */
int sum(struct session *session, const void *source, void *target, int64_t type, int64_t size, double factor) {
    session->activity[POSITION]++;
    if (session->size == 1 || size * item_bytes(type) < session->small_bytes)
        return (session->pairs ? by_pair : by_mpi)(session, source, target, type, size, factor);
    return (session->how[SEGMENT_BYTES] ? by_ring : by_mpi)(session, source, target, type, size, factor);
}
