// Carries IPv4 packets between the TUN devices of the lab's sites as WAN links would: rate with a tail-drop queue,
// delay, jitter, random loss and cuts, for each direction on its own.
//
// The devices hand over super-packets of up to 64 KiB (TSO), which is what makes several Gbit/s on one core
// possible. Queueing, loss and counters still apply to each wire packet inside them: a super-packet that loses
// some of its packets goes on as several smaller ones. Packets of one direction never overtake one another.
//
// Call: relay OWNER_PID SEED SITE..., a SITE being TUN_FD:NETNS_FD:ADDRESS; direction I*sites+J leads from site I to
// site J. Requests come as lines on stdin, each answered by one line on stdout:
//   set DIRECTION BITS_PER_S DELAY_NS JITTER_NS LOSS QUEUE_BYTES   (0 bits/s: no limit)
//   cut DIRECTION 0|1                                              (a cut loses what is under way, too)
//   stats DIRECTION
// When stdin ends, the owner dies or SIGTERM comes, it kills the processes that still live in its network
// namespaces, and exits; the kernel then removes devices and namespaces.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/virtio_net.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_SITES = 8,
    VNET_BYTES = sizeof(struct virtio_net_hdr),
    READ_BYTES = VNET_BYTES + 65536,
    READS_PER_TURN = 16,
    // What Ethernet adds to a packet: header, checksum, preamble, gap; a payload is padded to 46 bytes.
    FRAMING_BYTES = 38,
    MIN_PAYLOAD_BYTES = 46,
};
static const int64_t MS = 1000000;

struct packet {
    struct packet *next;
    int64_t arrived_ns, due_ns;
    int32_t bytes, wire_bytes, segments;
    uint8_t data[]; // virtio header, then IP
};

struct fifo {
    struct packet *head, *tail;
    int64_t wire_bytes, segments;
};

struct direction {
    double bits_per_s, loss;
    int64_t delay_ns, jitter_ns, queue_bytes;
    bool cut;
    struct fifo queue, flight; // waiting for the line; on it
    int64_t free_ns, last_due_ns; // when the line is free again; when the newest packet in flight arrives
    uint64_t loss_random, jitter_random;
    int64_t swing_from_ns, swing_until_ns;
    double swing_from, swing_to; // of -1..1, in units of the jitter
    // Wire packets; `bytes` are those of the packets delivered, framing included.
    uint64_t packets, bytes, lost, overflowed, severed, refused;
};

struct site {
    int tun_fd, namespace_fd;
    in_addr_t address;
};

// A packet as read: `segments` wire packets with a common header of `header` bytes (0: a single packet).
struct arrival {
    const uint8_t *data;
    int32_t bytes, segments, header, payload, segment_payload;
};

static struct site sites[MAX_SITES];
static int site_count;
static struct direction directions[MAX_SITES * MAX_SITES];
static volatile sig_atomic_t stopping;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 * MS + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

// splitmix64 as a number in [0, 1)
static double next_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static void push(struct fifo *fifo, struct packet *p) {
    p->next = NULL;
    if (fifo->tail) fifo->tail->next = p;
    else fifo->head = p;
    fifo->tail = p;
    fifo->wire_bytes += p->wire_bytes;
    fifo->segments += p->segments;
}

static struct packet *pop(struct fifo *fifo) {
    struct packet *p = fifo->head;
    fifo->head = p->next;
    if (!fifo->head) fifo->tail = NULL;
    fifo->wire_bytes -= p->wire_bytes;
    fifo->segments -= p->segments;
    return p;
}

// ---- the line: queue -> flight -> device

static int64_t line_ns(const struct direction *d, int64_t wire_bytes) {
    return d->bits_per_s > 0 ? (int64_t)((double)wire_bytes * 8e9 / d->bits_per_s) : 0;
}

// Bytes in the queue, less what of its head has gone out already.
static int64_t backlog_bytes(const struct direction *d, int64_t now) {
    if (!d->queue.head || d->bits_per_s <= 0) return d->queue.wire_bytes;
    int64_t sending_ns = now - later(d->free_ns, d->queue.head->arrived_ns);
    return d->queue.wire_bytes - (sending_ns > 0 ? (int64_t)((double)sending_ns * d->bits_per_s / 8e9) : 0);
}

// Delay at time t: it wanders between -jitter and +jitter slowly enough that packets keep their order.
static int64_t delay_ns(struct direction *d, int64_t t) {
    if (!d->jitter_ns) return d->delay_ns;
    int64_t period = later(20 * MS, 4 * d->jitter_ns);
    if (t >= d->swing_until_ns) {
        d->swing_from_ns = t - d->swing_until_ns < period ? d->swing_until_ns : t;
        d->swing_until_ns = d->swing_from_ns + period;
        d->swing_from = d->swing_to;
        d->swing_to = 2 * next_random(&d->jitter_random) - 1;
    }
    double share = (double)(t - d->swing_from_ns) / (double)(d->swing_until_ns - d->swing_from_ns);
    double swing = d->swing_from + share * (d->swing_to - d->swing_from);
    return d->delay_ns + (int64_t)(swing * (double)d->jitter_ns);
}

// Moves on what the line has sent by now.
static void serve(struct direction *d, int64_t now) {
    for (struct packet *p; (p = d->queue.head);) {
        int64_t sent = later(d->free_ns, p->arrived_ns) + line_ns(d, p->wire_bytes);
        if (sent > now) return;
        pop(&d->queue);
        d->free_ns = sent;
        p->due_ns = d->last_due_ns = later(d->last_due_ns, sent + delay_ns(d, sent));
        push(&d->flight, p);
    }
}

static void deliver(struct direction *d, int tun_fd, int64_t now) {
    while (d->flight.head && d->flight.head->due_ns <= now) {
        struct packet *p = pop(&d->flight);
        if (write(tun_fd, p->data, (size_t)p->bytes) == p->bytes) {
            d->packets += (uint64_t)p->segments;
            d->bytes += (uint64_t)p->wire_bytes;
        } else {
            d->refused += (uint64_t)p->segments;
        }
        free(p);
    }
}

// When there is something to do next.
static int64_t next_event_ns(const struct direction *d) {
    if (d->flight.head) return d->flight.head->due_ns;
    const struct packet *p = d->queue.head;
    return p ? later(d->free_ns, p->arrived_ns) + line_ns(d, p->wire_bytes) : INT64_MAX;
}

static void lose_all(struct direction *d, struct fifo *fifo) {
    while (fifo->head) {
        d->severed += (uint64_t)fifo->head->segments;
        free(pop(fifo));
    }
}

// ---- super-packets

static uint32_t add_words(uint32_t sum, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 2) {
        uint16_t word;
        memcpy(&word, (const uint8_t *)data + i, 2);
        sum += word;
    }
    return sum;
}

static uint16_t fold(uint32_t sum) {
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

static int32_t segment_payload(const struct arrival *a, int32_t i) {
    return i < a->segments - 1 ? a->segment_payload : a->payload - i * a->segment_payload;
}

static int32_t segment_wire_bytes(const struct arrival *a, int32_t i) {
    int32_t ip = a->header ? a->header + segment_payload(a, i) : a->bytes - VNET_BYTES;
    return (ip < MIN_PAYLOAD_BYTES ? MIN_PAYLOAD_BYTES : ip) + FRAMING_BYTES;
}

// Understands what was read; false when it is nothing that a link carries.
static bool parse(const uint8_t *data, ssize_t bytes, struct arrival *a) {
    struct virtio_net_hdr vnet;
    struct iphdr ip;
    struct tcphdr tcp;
    if (bytes < (ssize_t)(VNET_BYTES + sizeof ip)) return false;
    memcpy(&vnet, data, sizeof vnet);
    memcpy(&ip, data + VNET_BYTES, sizeof ip);
    if (ip.version != 4) return false;
    *a = (struct arrival){.data = data, .bytes = (int32_t)bytes, .segments = 1};
    if (vnet.gso_type == VIRTIO_NET_HDR_GSO_NONE) return true;
    if (vnet.gso_type != VIRTIO_NET_HDR_GSO_TCPV4 || !vnet.gso_size) return false;
    if (bytes < (ssize_t)(VNET_BYTES + vnet.csum_start + sizeof tcp)) return false;
    memcpy(&tcp, data + VNET_BYTES + vnet.csum_start, sizeof tcp);
    a->header = vnet.csum_start + tcp.doff * 4;
    a->payload = a->bytes - VNET_BYTES - a->header;
    a->segment_payload = vnet.gso_size;
    a->segments = (a->payload + vnet.gso_size - 1) / vnet.gso_size;
    return a->payload > 0;
}

// Makes wire packets first..first+count-1 of the super-packet one packet of their own, as TCP segmentation would
// have numbered them. `data` has room for it.
static int32_t cut_out(const struct arrival *a, int32_t first, int32_t count, uint8_t *data) {
    int32_t from = first * a->segment_payload;
    int32_t payload = 0;
    for (int32_t i = first; i < first + count; i++) payload += segment_payload(a, i);
    memcpy(data, a->data, (size_t)(VNET_BYTES + a->header));
    memcpy(data + VNET_BYTES + a->header, a->data + VNET_BYTES + a->header + from, (size_t)payload);

    struct virtio_net_hdr vnet;
    struct iphdr ip;
    struct tcphdr tcp;
    memcpy(&vnet, data, sizeof vnet);
    uint8_t *ip_at = data + VNET_BYTES, *tcp_at = ip_at + vnet.csum_start;
    memcpy(&ip, ip_at, sizeof ip);
    memcpy(&tcp, tcp_at, sizeof tcp);

    ip.tot_len = htons((uint16_t)(a->header + payload));
    ip.id = htons((uint16_t)(ntohs(ip.id) + first));
    ip.check = 0;
    memcpy(ip_at, &ip, sizeof ip);
    ip.check = (uint16_t)~fold(add_words(0, ip_at, ip.ihl * 4u));
    memcpy(ip_at, &ip, sizeof ip);

    tcp.seq = htonl(ntohl(tcp.seq) + (uint32_t)from);
    if (first + count < a->segments) tcp.fin = tcp.psh = 0;
    uint16_t tcp_bytes = (uint16_t)(a->header - vnet.csum_start + payload);
    uint32_t pseudo = add_words(htons(IPPROTO_TCP) + (uint32_t)htons(tcp_bytes), &ip.saddr, 8);
    tcp.check = fold(pseudo); // the device's user completes it, as for any offloaded packet
    memcpy(tcp_at, &tcp, sizeof tcp);

    vnet.hdr_len = (uint16_t)a->header;
    if (count == 1) vnet.gso_type = VIRTIO_NET_HDR_GSO_NONE, vnet.gso_size = 0;
    memcpy(data, &vnet, sizeof vnet);
    return VNET_BYTES + a->header + payload;
}

static void enqueue(struct direction *d, const struct arrival *a, int32_t first, int32_t count, int32_t wire_bytes,
                    int64_t now) {
    int32_t room = count == a->segments ? a->bytes : VNET_BYTES + a->header + count * a->segment_payload;
    struct packet *p = malloc(sizeof *p + (size_t)room);
    if (!p) {
        d->refused += (uint64_t)count;
        return;
    }
    p->arrived_ns = now;
    p->wire_bytes = wire_bytes;
    p->segments = count;
    if (count == a->segments) {
        memcpy(p->data, a->data, (size_t)a->bytes);
        p->bytes = a->bytes;
    } else {
        p->bytes = cut_out(a, first, count, p->data);
    }
    push(&d->queue, p);
}

// Decides for each wire packet; what goes on does so in runs that keep a slow line busy for a millisecond at most.
static void admit(struct direction *d, const struct arrival *a, int64_t now) {
    if (d->cut) {
        d->severed += (uint64_t)a->segments;
        return;
    }
    serve(d, now);
    int64_t room = d->queue_bytes - backlog_bytes(d, now);
    if (d->bits_per_s <= 0) room -= d->flight.wire_bytes; // nothing else would bound memory
    int64_t run_limit = d->bits_per_s > 0 ? (int64_t)(d->bits_per_s / 8e3) : INT64_MAX;
    int32_t count = 0, run_bytes = 0;
    for (int32_t i = 0; i < a->segments; i++) {
        int32_t wire_bytes = segment_wire_bytes(a, i);
        bool lost = d->loss > 0 && next_random(&d->loss_random) < d->loss;
        bool overflow = !lost && wire_bytes > room;
        bool keep = !lost && !overflow;
        if (count && (!keep || run_bytes + wire_bytes > run_limit)) {
            enqueue(d, a, i - count, count, run_bytes, now);
            count = run_bytes = 0;
        }
        d->lost += lost;
        d->overflowed += overflow;
        if (keep) count++, run_bytes += wire_bytes, room -= wire_bytes;
    }
    if (count) enqueue(d, a, a->segments - count, count, run_bytes, now);
}

// Reads what site `from` sends; true when there may be more.
static bool receive(int from) {
    static uint8_t buffer[READ_BYTES];
    for (int reads = 0; reads < READS_PER_TURN; reads++) {
        ssize_t bytes = read(sites[from].tun_fd, buffer, sizeof buffer);
        if (bytes <= 0) {
            if (errno != EAGAIN && errno != EINTR) {
                perror("relay: device");
                stopping = 1;
            }
            return false;
        }
        struct arrival a;
        if (!parse(buffer, bytes, &a)) continue;
        in_addr_t destination;
        memcpy(&destination, buffer + VNET_BYTES + offsetof(struct iphdr, daddr), sizeof destination);
        for (int to = 0; to < site_count; to++)
            if (to != from && sites[to].address == destination)
                admit(&directions[from * site_count + to], &a, now_ns());
    }
    return true;
}

// ---- control

static void answer(char *line) {
    int index, cut;
    double bits_per_s, loss;
    int64_t delay, jitter, queue;
    bool is_set = sscanf(line, "set %d %lf %" SCNd64 " %" SCNd64 " %lf %" SCNd64, &index, &bits_per_s, &delay, &jitter,
                         &loss, &queue) == 6;
    bool is_cut = !is_set && sscanf(line, "cut %d %d", &index, &cut) == 2;
    bool is_stats = !is_set && !is_cut && sscanf(line, "stats %d", &index) == 1;
    if (!(is_set || is_cut || is_stats) || index < 0 || index >= site_count * site_count) {
        dprintf(STDOUT_FILENO, "error: %s\n", line);
        return;
    }
    struct direction *d = &directions[index];
    serve(d, now_ns());
    if (is_set) {
        d->bits_per_s = bits_per_s, d->delay_ns = delay, d->jitter_ns = jitter, d->loss = loss, d->queue_bytes = queue;
    } else if (is_cut) {
        d->cut = cut;
        if (cut) lose_all(d, &d->queue), lose_all(d, &d->flight);
    }
    dprintf(STDOUT_FILENO,
            "ok %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRId64 " %" PRId64 "\n",
            d->packets, d->bytes, d->lost, d->overflowed, d->severed, d->refused,
            d->queue.segments + d->flight.segments, d->queue.wire_bytes + d->flight.wire_bytes);
}

// Answers complete lines; false at the end of the input.
static bool control(void) {
    static char pending[4096];
    static size_t used;
    ssize_t bytes = read(STDIN_FILENO, pending + used, sizeof pending - 1 - used);
    if (bytes < 0) return errno == EINTR || errno == EAGAIN;
    if (bytes == 0) return false;
    used += (size_t)bytes;
    pending[used] = 0;
    char *line = pending, *end;
    for (; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        answer(line);
    }
    used -= (size_t)(line - pending);
    memmove(pending, line, used);
    return used < sizeof pending - 1;
}

// ---- start and end

static void stop(int signal_number) {
    (void)signal_number;
    stopping = 1;
}

// Kills every process in the lab's namespaces but the owner; false when there was none.
static bool kill_inhabitants(pid_t owner) {
    bool found = false;
    DIR *proc = opendir("/proc");
    if (!proc) return false;
    for (struct dirent *entry; (entry = readdir(proc));) {
        pid_t pid = (pid_t)atoi(entry->d_name);
        if (pid <= 0 || pid == getpid() || pid == owner) continue;
        char path[64];
        struct stat theirs, ours;
        snprintf(path, sizeof path, "/proc/%d/ns/net", pid);
        if (stat(path, &theirs)) continue;
        for (int i = 0; i < site_count; i++)
            if (!fstat(sites[i].namespace_fd, &ours) && ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev) {
                kill(pid, SIGKILL);
                found = true;
            }
    }
    closedir(proc);
    return found;
}

static void carry(int owner_fd) {
    struct pollfd fds[MAX_SITES + 2];
    for (int i = 0; i < site_count; i++) fds[i] = (struct pollfd){.fd = sites[i].tun_fd, .events = POLLIN};
    fds[site_count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    fds[site_count + 1] = (struct pollfd){.fd = owner_fd, .events = POLLIN}; // -1 where the kernel has no pidfd
    while (!stopping) {
        bool more = false;
        for (int i = 0; i < site_count; i++) more |= receive(i);
        int64_t next = INT64_MAX;
        for (int i = 0; i < site_count * site_count; i++) {
            int64_t now = now_ns();
            serve(&directions[i], now);
            deliver(&directions[i], sites[i % site_count].tun_fd, now);
            if (next_event_ns(&directions[i]) < next) next = next_event_ns(&directions[i]);
        }
        int64_t wait = more ? 0 : next == INT64_MAX ? 1000 * MS : later(0, next - now_ns());
        struct timespec timeout = {.tv_sec = wait / (1000 * MS), .tv_nsec = wait % (1000 * MS)};
        if (ppoll(fds, (nfds_t)site_count + 2, &timeout, NULL) <= 0) continue;
        if (fds[site_count + 1].revents) return;
        if (fds[site_count].revents && !control()) return;
    }
}

int main(int argc, char **argv) {
    if (argc < 4 || argc - 3 > MAX_SITES) {
        fprintf(stderr, "usage: relay OWNER_PID SEED TUN_FD:NETNS_FD:ADDRESS... (at most %d sites)\n", MAX_SITES);
        return 2;
    }
    pid_t owner = (pid_t)atoi(argv[1]);
    uint64_t seed = strtoull(argv[2], NULL, 10);
    for (int i = 3; i < argc; i++) {
        struct site *s = &sites[site_count++];
        char address[32];
        if (sscanf(argv[i], "%d:%d:%31s", &s->tun_fd, &s->namespace_fd, address) != 3 ||
            inet_pton(AF_INET, address, &s->address) != 1) {
            fprintf(stderr, "not a site: %s\n", argv[i]);
            return 2;
        }
        fcntl(s->tun_fd, F_SETFL, fcntl(s->tun_fd, F_GETFL) | O_NONBLOCK);
    }
    for (int i = 0; i < site_count * site_count; i++) {
        directions[i].loss_random = seed * 1000003u + (uint64_t)i * 2;
        directions[i].jitter_random = seed * 1000003u + (uint64_t)i * 2 + 1;
    }
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1UL);
    setpriority(PRIO_PROCESS, 0, -10); // a link does not wait for a CPU; no matter where it is not allowed
    int owner_fd = -1;
#ifdef SYS_pidfd_open
    owner_fd = (int)syscall(SYS_pidfd_open, owner, 0);
#endif
    dprintf(STDOUT_FILENO, "ready\n");
    carry(owner_fd);
    for (int tries = 0; tries < 100 && kill_inhabitants(owner); tries++)
        nanosleep(&(struct timespec){.tv_nsec = 10 * MS}, NULL);
    return 0;
}
