/* The limits of bench_limits.py: memcpy, process_vm_writev and vectored TCP over prebuilt lists,
 * with any number of threads or streams, without checks. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

typedef struct { char *dst; const char *src; size_t len; } seg_t;

/* ---------------- memcpy with T threads ---------------- */
struct job { seg_t *s; size_t n; };
static void *mc(void *p) { struct job *j = p; for (size_t i = 0; i < j->n; i++) memcpy(j->s[i].dst, j->s[i].src, j->s[i].len); return 0; }
int raw_memcpy(char *dbase, const char *sbase, const int64_t *d, const int64_t *s, size_t n, size_t len, int threads) {
  if (threads <= 1) { for (size_t i = 0; i < n; i++) memcpy(dbase + d[i], sbase + s[i], len); return 0; }
  seg_t *v; struct job j[16]; pthread_t t[16];
  if (n == 1) { /* split one block */
    v = malloc(sizeof(seg_t) * threads);
    size_t part = len / threads;
    for (int k = 0; k < threads; k++) v[k] = (seg_t){dbase + d[0] + k * part, sbase + s[0] + k * part, k == threads - 1 ? len - part * k : part};
    for (int k = 0; k < threads; k++) j[k] = (struct job){v + k, 1};
  } else {
    v = malloc(sizeof(seg_t) * n);
    for (size_t i = 0; i < n; i++) v[i] = (seg_t){dbase + d[i], sbase + s[i], len};
    size_t part = n / threads;
    for (int k = 0; k < threads; k++) j[k] = (struct job){v + k * part, k == threads - 1 ? n - part * k : part};
  }
  for (int k = 1; k < threads; k++) pthread_create(&t[k], 0, mc, &j[k]);
  mc(&j[0]);
  for (int k = 1; k < threads; k++) pthread_join(t[k], 0);
  free(v);
  return 0;
}

/* ---------------- CMA: process_vm_writev / readv ---------------- */
#define IOVMAX 1024
struct cj { int pid; uint64_t db; const char *sb; const int64_t *d, *s; size_t n, len; int rc, rd; };
static int cma_range(struct cj *c) {
  struct iovec l[IOVMAX], r[IOVMAX];
  for (size_t i = 0; i < c->n; i += IOVMAX) {
    size_t m = c->n - i < IOVMAX ? c->n - i : IOVMAX;
    for (size_t k = 0; k < m; k++) {
      l[k] = (struct iovec){(void *)(c->sb + c->s[i + k]), c->len};
      r[k] = (struct iovec){(void *)(c->db + c->d[i + k]), c->len};
    }
    size_t want = m * c->len, done = 0;
    struct iovec *lp = l, *rp = r; size_t lm = m;
    while (done < want) {
      ssize_t w = c->rd ? process_vm_readv(c->pid, lp, lm, rp, lm, 0) : process_vm_writev(c->pid, lp, lm, rp, lm, 0);
      if (w <= 0) return -errno;
      done += w;
      while (lm && (size_t)w >= lp->iov_len) { w -= lp->iov_len; lp++; rp++; lm--; }
      if (lm && w) { lp->iov_base = (char *)lp->iov_base + w; rp->iov_base = (char *)rp->iov_base + w; lp->iov_len -= w; rp->iov_len -= w; }
    }
  }
  return 0;
}
static void *cmat(void *p) { struct cj *c = p; c->rc = cma_range(c); return 0; }
int raw_cma(int pid, uint64_t dbase, const char *sbase, const int64_t *d, const int64_t *s, size_t n, size_t len, int threads, int rd) {
  struct cj c[16]; pthread_t t[16]; int64_t dd[16], ss[16];
  if (threads <= 1) { c[0] = (struct cj){pid, dbase, sbase, d, s, n, len, 0, rd}; return cma_range(&c[0]); }
  if (n == 1) { size_t part = len / threads; /* assume divisible */
    for (int k = 0; k < threads; k++) { dd[k] = d[0] + k * part; ss[k] = s[0] + k * part; c[k] = (struct cj){pid, dbase, sbase, dd + k, ss + k, 1, part, 0, rd}; }
  } else { size_t part = n / threads;
    for (int k = 0; k < threads; k++) c[k] = (struct cj){pid, dbase, sbase, d + k * part, s + k * part, k == threads - 1 ? n - part * k : part, len, 0, rd}; }
  for (int k = 1; k < threads; k++) pthread_create(&t[k], 0, cmat, &c[k]);
  cmat(&c[0]); int rc = c[0].rc;
  for (int k = 1; k < threads; k++) { pthread_join(t[k], 0); if (c[k].rc) rc = c[k].rc; }
  return rc;
}

/* ---------------- loopback TCP: header {n,len}, n offsets, payload; 8-byte ack ----------------
 * payload is received straight into the destination pages (readv), sent with writev. */
static int rd_full(int fd, void *p, size_t n) { char *c = p; while (n) { ssize_t r = recv(fd, c, n, 0); if (r <= 0) return -1; c += r; n -= r; } return 0; }
static int wr_full(int fd, const void *p, size_t n) { const char *c = p; while (n) { ssize_t r = send(fd, c, n, MSG_NOSIGNAL); if (r <= 0) return -1; c += r; n -= r; } return 0; }
static int iov_full(int fd, struct iovec *v, size_t m, int wr) {
  while (m) {
    size_t k = m < IOVMAX ? m : IOVMAX; ssize_t r = wr ? writev(fd, v, k) : readv(fd, v, k);
    if (r <= 0) return -1;
    while (m && (size_t)r >= v->iov_len) { r -= v->iov_len; v++; m--; }
    if (m && r) { v->iov_base = (char *)v->iov_base + r; v->iov_len -= r; }
  }
  return 0;
}
static char *g_base;
static void *srv_conn(void *a) {
  int fd = (int)(intptr_t)a; uint64_t h[2];
  int64_t *off = 0; struct iovec *v = 0; size_t cap = 0;
  while (!rd_full(fd, h, 16)) {
    size_t n = h[0], len = h[1];
    if (n > cap) { off = realloc(off, n * 8); v = realloc(v, n * sizeof *v); cap = n; }
    if (rd_full(fd, off, n * 8)) break;
    for (size_t i = 0; i < n; i++) v[i] = (struct iovec){g_base + off[i], len};
    if (iov_full(fd, v, n, 0)) break;
    uint64_t ok = 1; if (wr_full(fd, &ok, 8)) break;
  }
  close(fd); free(off); free(v); return 0;
}
static void *srv(void *a) {
  int ls = (int)(intptr_t)a;
  for (;;) { int fd = accept(ls, 0, 0); if (fd < 0) return 0; int one = 1; setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, 4);
    pthread_t t; pthread_create(&t, 0, srv_conn, (void *)(intptr_t)fd); pthread_detach(t); }
}
int raw_tcp_server(char *base) {
  g_base = base; int s = socket(AF_INET, SOCK_STREAM, 0); struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(s, (void *)&a, sizeof a) || listen(s, 16)) return -1;
  socklen_t l = sizeof a; getsockname(s, (void *)&a, &l);
  pthread_t t; pthread_create(&t, 0, srv, (void *)(intptr_t)s); pthread_detach(t);
  return ntohs(a.sin_port);
}
int raw_tcp_connect(int port, const char *cc) {
  int s = socket(AF_INET, SOCK_STREAM, 0); struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (cc && *cc) setsockopt(s, IPPROTO_TCP, TCP_CONGESTION, cc, strlen(cc));
  if (connect(s, (void *)&a, sizeof a)) return -1;
  int one = 1; setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, 4);
  return s;
}
struct tj { int fd; const char *sb; const int64_t *d, *s; size_t n, len; int rc; };
static void *tcp_one(void *p) {
  struct tj *j = p; uint64_t h[2] = {j->n, j->len}; j->rc = -1;
  struct iovec *v = malloc(sizeof *v * (j->n + 2));
  v[0] = (struct iovec){h, 16}; v[1] = (struct iovec){(void *)j->d, j->n * 8};
  for (size_t i = 0; i < j->n; i++) v[i + 2] = (struct iovec){(void *)(j->sb + j->s[i]), j->len};
  uint64_t ok;
  if (!iov_full(j->fd, v, j->n + 2, 1) && !rd_full(j->fd, &ok, 8)) j->rc = 0;
  free(v); return 0;
}
int raw_tcp_write(const int *fds, int nf, const char *sbase, const int64_t *d, const int64_t *s, size_t n, size_t len) {
  struct tj j[16]; pthread_t t[16]; int64_t dd[16], ss[16];
  if (nf == 1) { j[0] = (struct tj){fds[0], sbase, d, s, n, len, 0}; tcp_one(&j[0]); return j[0].rc; }
  if (n == 1) { size_t part = len / nf; for (int k = 0; k < nf; k++) { dd[k] = d[0] + k * part; ss[k] = s[0] + k * part; j[k] = (struct tj){fds[k], sbase, dd + k, ss + k, 1, part, 0}; } }
  else { size_t part = n / nf; for (int k = 0; k < nf; k++) j[k] = (struct tj){fds[k], sbase, d + k * part, s + k * part, k == nf - 1 ? n - part * k : part, len, 0}; }
  for (int k = 1; k < nf; k++) pthread_create(&t[k], 0, tcp_one, &j[k]);
  tcp_one(&j[0]); int rc = j[0].rc;
  for (int k = 1; k < nf; k++) { pthread_join(t[k], 0); if (j[k].rc) rc = j[k].rc; }
  return rc;
}
