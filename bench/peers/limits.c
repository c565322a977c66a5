/* The limits of bench_limits.py: memcpy, process_vm_writev (or readv) and vectored TCP over prebuilt
 * lists of equal ranges, with any number of threads or streams, without checks.
 *
 * A call splits its list between the threads: whole ranges, or parts of the only one. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define MAX_THREADS 64
#define VECTOR 1024 /* ranges of one system call (IOV_MAX) */

/* One thread's share: `count` ranges of `len` bytes at offsets of two bases. */
typedef struct {
  char *dst_base;
  const char *src_base;
  const int64_t *dst, *src;
  size_t count, len;
  int64_t only_dst, only_src; /* the offsets, where a single range was split */
  int pid, is_read, stream, is_streaming; /* of one way or the other */
  int code;
} share_t;

typedef void *(*work_t)(void *);

/* Splits a call's list, runs a thread for each share (the caller's is the first) and returns the
 * first failure. */
static int run_shares(const share_t *whole, int threads, const int *streams, work_t work) {
  share_t shares[MAX_THREADS];
  pthread_t handles[MAX_THREADS];
  if (threads > MAX_THREADS) return -EINVAL;
  size_t part = whole->count == 1 ? whole->len / threads : whole->count / threads;
  for (int i = 0; i < threads; i++) {
    share_t *share = &shares[i];
    int is_last = i == threads - 1;
    *share = *whole;
    if (streams) share->stream = streams[i];
    if (whole->count == 1) {
      share->only_dst = whole->dst[0] + i * part;
      share->only_src = whole->src[0] + i * part;
      share->dst = &share->only_dst;
      share->src = &share->only_src;
      share->len = is_last ? whole->len - part * i : part;
    } else {
      share->dst += i * part;
      share->src += i * part;
      share->count = is_last ? whole->count - part * i : part;
    }
  }
  for (int i = 1; i < threads; i++) pthread_create(&handles[i], 0, work, &shares[i]);
  work(&shares[0]);
  int code = shares[0].code;
  for (int i = 1; i < threads; i++) {
    pthread_join(handles[i], 0);
    if (shares[i].code) code = shares[i].code;
  }
  return code;
}

/* ---- memcpy ---- */

#ifdef __x86_64__
/* Stores that go past the caches. */
__attribute__((target("avx2"))) static void copy_streaming(char *dst, const char *src, size_t len) {
  if (((uintptr_t)dst | len) & 127) {
    memcpy(dst, src, len);
    return;
  }
  for (size_t at = 0; at < len; at += 128) {
    _mm_prefetch(src + at + 1024, _MM_HINT_NTA);
    _mm_prefetch(src + at + 1088, _MM_HINT_NTA);
    __m256i a = _mm256_loadu_si256((const void *)(src + at));
    __m256i b = _mm256_loadu_si256((const void *)(src + at + 32));
    __m256i c = _mm256_loadu_si256((const void *)(src + at + 64));
    __m256i d = _mm256_loadu_si256((const void *)(src + at + 96));
    _mm256_stream_si256((void *)(dst + at), a);
    _mm256_stream_si256((void *)(dst + at + 32), b);
    _mm256_stream_si256((void *)(dst + at + 64), c);
    _mm256_stream_si256((void *)(dst + at + 96), d);
  }
  _mm_sfence();
}
#else
static void copy_streaming(char *dst, const char *src, size_t len) { memcpy(dst, src, len); }
#endif

static void *copy_share(void *argument) {
  share_t *share = argument;
  for (size_t i = 0; i < share->count; i++) {
    char *dst = share->dst_base + share->dst[i];
    const char *src = share->src_base + share->src[i];
    if (share->is_streaming) copy_streaming(dst, src, share->len);
    else memcpy(dst, src, share->len);
  }
  return 0;
}

int limit_memcpy(char *dst_base, const char *src_base, const int64_t *dst, const int64_t *src,
                 size_t count, size_t len, int threads, int is_streaming) {
  share_t whole = {dst_base, src_base, dst, src, count, len, .is_streaming = is_streaming};
  return run_shares(&whole, threads, 0, copy_share);
}

/* ---- process_vm_writev and process_vm_readv ---- */

/* Takes `done` bytes off the front of a vector. */
static void advance(struct iovec **vector, size_t *left, size_t done) {
  while (*left && done >= (*vector)->iov_len) {
    done -= (*vector)->iov_len;
    (*vector)++;
    (*left)--;
  }
  if (*left && done) {
    (*vector)->iov_base = (char *)(*vector)->iov_base + done;
    (*vector)->iov_len -= done;
  }
}

static void *cma_share(void *argument) {
  share_t *share = argument;
  struct iovec dst_vector[VECTOR], src_vector[VECTOR];
  for (size_t first = 0; first < share->count; first += VECTOR) {
    size_t count = share->count - first < VECTOR ? share->count - first : VECTOR;
    for (size_t i = 0; i < count; i++) {
      char *dst = share->dst_base + share->dst[first + i];
      char *src = (char *)share->src_base + share->src[first + i];
      dst_vector[i] = (struct iovec){dst, share->len};
      src_vector[i] = (struct iovec){src, share->len};
    }
    struct iovec *dst_at = dst_vector, *src_at = src_vector;
    size_t dst_left = count, src_left = count;
    while (dst_left) {
      ssize_t done = share->is_read
          ? process_vm_readv(share->pid, dst_at, dst_left, src_at, src_left, 0)
          : process_vm_writev(share->pid, src_at, src_left, dst_at, dst_left, 0);
      if (done <= 0) {
        share->code = -errno;
        return 0;
      }
      advance(&dst_at, &dst_left, done);
      advance(&src_at, &src_left, done);
    }
  }
  return 0;
}

/* The base that is not in this process is an address in that one. */
int limit_cma(char *dst_base, const char *src_base, const int64_t *dst, const int64_t *src,
              size_t count, size_t len, int threads, int pid, int is_read) {
  share_t whole = {dst_base, src_base, dst, src, count, len, .pid = pid, .is_read = is_read};
  return run_shares(&whole, threads, 0, cma_share);
}

/* ---- TCP: header {count, len}, the offsets, the payload; an answer of 8 bytes ---- */

static int receive_all(int fd, void *to, size_t len) {
  for (char *at = to; len;) {
    ssize_t done = recv(fd, at, len, 0);
    if (done <= 0) return -1;
    at += done;
    len -= done;
  }
  return 0;
}

static int send_all(int fd, const void *from, size_t len) {
  for (const char *at = from; len;) {
    ssize_t done = send(fd, at, len, MSG_NOSIGNAL);
    if (done <= 0) return -1;
    at += done;
    len -= done;
  }
  return 0;
}

static int move_all(int fd, struct iovec *vector, size_t left, int is_send) {
  while (left) {
    int count = left < VECTOR ? left : VECTOR;
    ssize_t done = is_send ? writev(fd, vector, count) : readv(fd, vector, count);
    if (done <= 0) return -1;
    advance(&vector, &left, done);
  }
  return 0;
}

static char *received_base;

static void *serve_connection(void *argument) {
  int fd = (int)(intptr_t)argument;
  uint64_t header[2];
  int64_t *offsets = 0;
  struct iovec *vector = 0;
  size_t capacity = 0;
  while (!receive_all(fd, header, sizeof header)) {
    size_t count = header[0], len = header[1];
    if (count > capacity) {
      offsets = realloc(offsets, count * sizeof *offsets);
      vector = realloc(vector, count * sizeof *vector);
      capacity = count;
    }
    if (receive_all(fd, offsets, count * sizeof *offsets)) break;
    for (size_t i = 0; i < count; i++) vector[i] = (struct iovec){received_base + offsets[i], len};
    if (move_all(fd, vector, count, 0)) break;
    uint64_t answer = 1;
    if (send_all(fd, &answer, sizeof answer)) break;
  }
  close(fd);
  free(offsets);
  free(vector);
  return 0;
}

static void at_once(int fd) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void *accept_all(void *argument) {
  int listener = (int)(intptr_t)argument;
  for (;;) {
    int fd = accept(listener, 0, 0);
    if (fd < 0) return 0;
    at_once(fd);
    pthread_t thread;
    pthread_create(&thread, 0, serve_connection, (void *)(intptr_t)fd);
    pthread_detach(thread);
  }
}

/* Returns the port. */
int limit_tcp_server(char *base) {
  received_base = base;
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 16)) return -1;
  socklen_t len = sizeof address;
  getsockname(listener, (void *)&address, &len);
  pthread_t thread;
  pthread_create(&thread, 0, accept_all, (void *)(intptr_t)listener);
  pthread_detach(thread);
  return ntohs(address.sin_port);
}

/* Returns the stream; `congestion` may be empty. */
int limit_tcp_connect(int port, const char *congestion) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_port = htons(port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (*congestion) {
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, strlen(congestion));
  }
  if (connect(fd, (void *)&address, sizeof address)) return -1;
  at_once(fd);
  return fd;
}

static void *tcp_share(void *argument) {
  share_t *share = argument;
  uint64_t header[2] = {share->count, share->len}, answer;
  struct iovec *vector = malloc(sizeof *vector * (share->count + 2));
  vector[0] = (struct iovec){header, sizeof header};
  vector[1] = (struct iovec){(void *)share->dst, share->count * sizeof *share->dst};
  for (size_t i = 0; i < share->count; i++) {
    vector[i + 2] = (struct iovec){(void *)(share->src_base + share->src[i]), share->len};
  }
  share->code = move_all(share->stream, vector, share->count + 2, 1)
      || receive_all(share->stream, &answer, sizeof answer) ? -1 : 0;
  free(vector);
  return 0;
}

int limit_tcp_write(const int *streams, const char *src_base, const int64_t *dst,
                    const int64_t *src, size_t count, size_t len, int threads) {
  share_t whole = {.src_base = src_base, .dst = dst, .src = src, .count = count, .len = len};
  return run_shares(&whole, threads, streams, tcp_share);
}
