/* What a machine, its kernel and the load beside them leave to any bootstrap server: one that reads
 * requests without looking at them and answers all alike.
 *
 *   limit PORT BYTES          answers with a body of BYTES
 *   limit PORT BYTES LOG      appends each request to LOG and synchronises it before it answers
 *
 * Two threads share the port of loopback. What is there when a thread looks is done at once: one
 * write and one fdatasync for all of it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define THREADS 2
#define EVENTS 64
#define REQUEST_BYTES 4096      /* of one recv: wrk sends each request as one part */
#define MAX_BODY 60000

static char answer[MAX_BODY + 256];
static size_t answer_bytes;
static int log_file = -1;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int listen_at(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one) ||
        bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 128))
        fail("listen");
    return listener;
}

static void watch(int queue, int socket) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = socket};
    if (epoll_ctl(queue, EPOLL_CTL_ADD, socket, &event)) fail("epoll_ctl");
}

static void take(int queue, int listener) {
    int one = 1, client = accept(listener, NULL, NULL);
    if (client < 0) return;
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    watch(queue, client);
}

static void *serve(void *listener_at) {
    int listener = *(int *)listener_at, queue = epoll_create1(0);
    struct epoll_event events[EVENTS];
    static _Thread_local char requests[EVENTS * REQUEST_BYTES];
    int clients[EVENTS];
    watch(queue, listener);
    for (;;) {
        size_t bytes = 0, count = 0;
        int ready = epoll_wait(queue, events, EVENTS, -1);
        for (int at = 0; at < ready; at++) {
            int client = events[at].data.fd;
            if (client == listener) {
                take(queue, listener);
                continue;
            }
            ssize_t got = recv(client, requests + bytes, REQUEST_BYTES, 0);
            if (got <= 0) {
                close(client);
                continue;
            }
            if (log_file < 0) {
                send(client, answer, answer_bytes, MSG_NOSIGNAL);
                continue;
            }
            bytes += got;
            clients[count++] = client;
        }
        if (bytes && (write(log_file, requests, bytes) != (ssize_t)bytes || fdatasync(log_file)))
            fail("log");
        for (size_t at = 0; at < count; at++)
            send(clients[at], answer, answer_bytes, MSG_NOSIGNAL);
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count < 3) {
        fprintf(stderr, "usage: limit PORT BYTES [LOG]\n");
        return 2;
    }
    int port = atoi(arguments[1]), body = atoi(arguments[2]);
    if (body < 0 || body > MAX_BODY) {
        fprintf(stderr, "BYTES is %d, at most %d are possible\n", body, MAX_BODY);
        return 2;
    }
    answer_bytes = sprintf(answer, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n"
                           "Content-Type: application/json; charset=utf-8\r\n\r\n", body);
    memset(answer + answer_bytes, 'x', body);
    answer_bytes += body;
    if (count > 3) {
        log_file = open(arguments[3], O_CREAT | O_WRONLY | O_APPEND, 0600);
        if (log_file < 0) fail(arguments[3]);
    }
    pthread_t threads[THREADS];
    int listeners[THREADS];
    for (int at = 0; at < THREADS; at++) {
        listeners[at] = listen_at(port);
        if (pthread_create(&threads[at], NULL, serve, &listeners[at])) fail("thread");
    }
    pthread_join(threads[0], NULL);
}
