/* What the machine can do with the ranges of a workload: prebuilt arrays, no checks, no protocol.
 *
 *   raw_limit recv POOL...                          receives over TCP; prints its port
 *   raw_limit send THREADS PORT ARRAYS POOL... -- POOL...   source pools, then destination pools
 *
 * `send` answers each line of its input with the nanoseconds that a round took: "copy" copies every
 * range with THREADS threads between the mapped pools (memcpy), "stream" does so past the caches
 * where the processor can, "tcp" sends every range over THREADS streams to `recv`. Threads take blocks of ranges from one counter, so that none idles while
 * another is held up.
 *
 * ARRAYS holds native 64-bit numbers: the number of requests, then for each request the number of
 * its ranges and for each range pool, source offset, destination offset and length. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_POOLS 8
#define MAX_THREADS 64
#define VECTOR 1024             /* ranges of one system call (IOV_MAX) */
#define COPY_BLOCK (4u << 20)   /* bytes that a copying thread takes at once */

typedef struct { uint64_t pool, src, dst, len; } range_t;
typedef struct { size_t first, count; } block_t;

static char *src_pools[MAX_POOLS], *dst_pools[MAX_POOLS];
static range_t *ranges;
static size_t range_count;
static block_t *copy_blocks, *send_blocks;
static size_t copy_block_count, send_block_count;
static size_t next_block;
static int threads;
static int streams[MAX_THREADS];

static void die(const char *what) { perror(what); exit(1); }

static char *map_pool(const char *path) {
  int fd = open(path, O_RDWR);
  struct stat info;
  if (fd < 0 || fstat(fd, &info)) die(path);
  char *base = mmap(0, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) die("mmap");
  close(fd);
  return base;
}

static int read_all(int fd, void *to, size_t n) {
  for (char *at = to; n;) { ssize_t r = recv(fd, at, n, 0); if (r <= 0) return -1; at += r; n -= r; }
  return 0;
}

static int vector_all(int fd, struct iovec *v, size_t n, int writing) {
  while (n) {
    size_t some = n < VECTOR ? n : VECTOR;
    ssize_t r = writing ? writev(fd, v, some) : readv(fd, v, some);
    if (r <= 0) return -1;
    while (n && (size_t)r >= v->iov_len) { r -= v->iov_len; v++; n--; }
    if (n && r) { v->iov_base = (char *)v->iov_base + r; v->iov_len -= r; }
  }
  return 0;
}

/* A message: number of ranges, the ranges, their bytes; answered with eight bytes. */
static void *receive(void *argument) {
  int fd = (int)(intptr_t)argument;
  range_t *list = 0; struct iovec *v = 0; size_t room = 0; uint64_t n;
  while (!read_all(fd, &n, 8)) {
    if (n > room) { list = realloc(list, n * sizeof *list); v = realloc(v, n * sizeof *v); room = n; }
    if (read_all(fd, list, n * sizeof *list)) break;
    for (size_t i = 0; i < n; i++) v[i] = (struct iovec){dst_pools[list[i].pool] + list[i].dst, list[i].len};
    if (vector_all(fd, v, n, 0)) break;
    if (send(fd, &n, 8, MSG_NOSIGNAL) != 8) break;
  }
  close(fd);
  return 0;
}

static int no_delay(int fd) { int one = 1; setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); return fd; }

static void serve(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, MAX_THREADS)) die("listen");
  getsockname(listener, (void *)&address, &length);
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  for (;;) {
    pthread_t thread;
    int fd = accept(listener, 0, 0);
    if (fd < 0) return;
    pthread_create(&thread, 0, receive, (void *)(intptr_t)no_delay(fd));
    pthread_detach(thread);
  }
}

static void load(const char *path) {
  FILE *file = fopen(path, "rb");
  uint64_t requests, n;
  if (!file || fread(&requests, 8, 1, file) != 1) die(path);
  for (uint64_t request = 0; request < requests; request++) {
    if (fread(&n, 8, 1, file) != 1) die(path);
    ranges = realloc(ranges, (range_count + n) * sizeof *ranges);
    if (fread(ranges + range_count, sizeof *ranges, n, file) != n) die(path);
    /* Blocks never span requests. */
    uint64_t total = 0;
    for (size_t i = range_count; i < range_count + n; i++) total += ranges[i].len;
    size_t limits[2] = {COPY_BLOCK, total / threads};
    block_t **lists[2] = {&copy_blocks, &send_blocks};
    size_t *counts[2] = {&copy_block_count, &send_block_count};
    for (int kind = 0; kind < 2; kind++) {
      size_t first = range_count, bytes = 0;
      for (size_t i = range_count; i < range_count + n; i++) {
        bytes += ranges[i].len;
        if (bytes < limits[kind] && i + 1 < range_count + n) continue;
        *lists[kind] = realloc(*lists[kind], (*counts[kind] + 1) * sizeof(block_t));
        (*lists[kind])[(*counts[kind])++] = (block_t){first, i + 1 - first};
        first = i + 1; bytes = 0;
      }
    }
    range_count += n;
  }
  fclose(file);
}

/* On some processors faster than memcpy for pages that are copied once, on others slower. */
#ifdef __x86_64__
#include <immintrin.h>
__attribute__((target("avx2"))) static void copy_past_caches(char *dst, const char *src, size_t n) {
  size_t head = -(uintptr_t)dst & 31;
  if (head > n) head = n;
  memcpy(dst, src, head);
  size_t at = head;
  for (; at + 128 <= n; at += 128) {
    _mm_prefetch(src + at + 512, _MM_HINT_T0);
    _mm_prefetch(src + at + 576, _MM_HINT_T0);
    for (int k = 0; k < 128; k += 32)
      _mm256_stream_si256((__m256i *)(dst + at + k), _mm256_loadu_si256((const __m256i *)(src + at + k)));
  }
  memcpy(dst + at, src + at, n - at);
  _mm_sfence();
}
static int can_stream(void) { return __builtin_cpu_supports("avx2"); }
#else
static void copy_past_caches(char *dst, const char *src, size_t n) { memcpy(dst, src, n); }
static int can_stream(void) { return 0; }
#endif
static int streaming;

static void *copy_some(void *unused) {
  for (;;) {
    size_t at = __atomic_fetch_add(&next_block, 1, __ATOMIC_RELAXED);
    if (at >= copy_block_count) return unused;
    const range_t *r = ranges + copy_blocks[at].first;
    for (size_t i = 0; i < copy_blocks[at].count; i++, r++)
      if (streaming) copy_past_caches(dst_pools[r->pool] + r->dst, src_pools[r->pool] + r->src, r->len);
      else memcpy(dst_pools[r->pool] + r->dst, src_pools[r->pool] + r->src, r->len);
  }
}

static void *send_some(void *argument) {
  int fd = streams[(intptr_t)argument];
  struct iovec *v = 0; size_t room = 0;
  for (;;) {
    size_t at = __atomic_fetch_add(&next_block, 1, __ATOMIC_RELAXED);
    if (at >= send_block_count) { free(v); return 0; }
    uint64_t n = send_blocks[at].count, answer;
    range_t *r = ranges + send_blocks[at].first;
    if (n + 2 > room) { room = n + 2; v = realloc(v, room * sizeof *v); }
    v[0] = (struct iovec){&n, 8};
    v[1] = (struct iovec){r, n * sizeof *r};
    for (size_t i = 0; i < n; i++) v[i + 2] = (struct iovec){src_pools[r[i].pool] + r[i].src, r[i].len};
    if (vector_all(fd, v, n + 2, 1) || read_all(fd, &answer, 8)) die("stream");
  }
}

static uint64_t now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }

int main(int count, char **words) {
  if (count > 2 && !strcmp(words[1], "recv")) {
    for (int i = 2; i < count && i - 2 < MAX_POOLS; i++) dst_pools[i - 2] = map_pool(words[i]);
    serve();
    return 0;
  }
  if (count < 8 || strcmp(words[1], "send")) return 2;
  threads = atoi(words[2]);
  if (threads < 1 || threads > MAX_THREADS) return 2;
  char **pools = src_pools;
  for (int i = 5, at = 0; i < count; i++) {
    if (!strcmp(words[i], "--")) { pools = dst_pools; at = 0; continue; }
    if (at < MAX_POOLS) pools[at++] = map_pool(words[i]);
  }
  load(words[4]);
  for (int k = 0; k < threads; k++) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[3])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    streams[k] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(streams[k], (void *)&address, sizeof address)) die("connect");
    no_delay(streams[k]);
  }
  printf("ready\n");
  fflush(stdout);
  char line[16];
  while (fgets(line, sizeof line, stdin)) {
    void *(*work)(void *) = line[0] == 't' ? send_some : copy_some;
    pthread_t others[MAX_THREADS];
    next_block = 0;
    streaming = line[0] == 's' && can_stream();
    uint64_t begun = now();
    for (int k = 1; k < threads; k++) pthread_create(&others[k], 0, work, (void *)(intptr_t)k);
    work(0);
    for (int k = 1; k < threads; k++) pthread_join(others[k], 0);
    printf("%llu\n", (unsigned long long)(now() - begun));
    fflush(stdout);
  }
  return 0;
}
