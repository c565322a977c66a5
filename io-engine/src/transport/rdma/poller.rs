//! A completion thread: it sleeps until a queue pair has something to say, looks on for a short
//! while where that has paid off, and notices what is stuck.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::error::TransportError;
use crate::sys::{self, Interest};
use crate::transport::rdma::endpoint::Endpoint;
use crate::transport::rdma::rail::Rail;
use crate::transport::rdma::verbs::{CompletionChannel, Device};

/// How long a thread looks on after a completion at most, before it sleeps. A wake-up costs about
/// as much.
const LONGEST_SPIN: Duration = Duration::from_micros(50);
const SHORTEST_SPIN: Duration = Duration::from_micros(1);
/// While work is under way, how often stuck work is looked for.
const TICK: Duration = Duration::from_millis(50);

pub(crate) struct Poller {
    channel: Arc<CompletionChannel>,
    endpoints: Mutex<HashMap<u64, Weak<Endpoint>>>,
    wake: File,
    is_over: AtomicBool,
    /// Whether the thread sleeps without a tick.
    sleeps_long: AtomicBool,
}

impl Poller {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, TransportError> {
        Ok(Self {
            channel: Arc::new(CompletionChannel::new(device)?),
            endpoints: Mutex::default(),
            wake: sys::event().map_err(|error| TransportError::io("eventfd", &error))?,
            is_over: AtomicBool::new(false),
            sleeps_long: AtomicBool::new(false),
        })
    }

    /// Starts the thread; with a rail it hears what happens to the device, too.
    pub(crate) fn start(
        poller: &Arc<Self>,
        rail_opt: Option<Weak<Rail>>,
    ) -> Result<(), TransportError> {
        let poller = Arc::clone(poller);
        std::thread::Builder::new()
            .name("ferry-rdma".to_owned())
            .spawn(move || poller.run(rail_opt.as_ref()))
            .map(|_| ())
            .map_err(|error| TransportError::io("starting a thread", &error))
    }

    pub(crate) const fn channel(&self) -> &Arc<CompletionChannel> {
        &self.channel
    }

    pub(crate) fn adopt(&self, number: u64, endpoint: &Arc<Endpoint>) {
        let mut endpoints = self.lock();
        endpoints.retain(|_, endpoint| endpoint.strong_count() > 0);
        endpoints.insert(number, Arc::downgrade(endpoint));
        drop(endpoints);
        // An event that came before belonged to nobody, and there is no other until it asks again.
        endpoint.process();
    }

    pub(crate) fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Work was posted: a thread that sleeps long must wake to look for stuck work.
    pub(crate) fn posted(&self) {
        if self.sleeps_long.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.wake();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Weak<Endpoint>>> {
        self.endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Full only after 2^64 wake-ups that nobody took.
        let _ = (&self.wake).write(&1u64.to_ne_bytes());
    }

    fn run(&self, rail_opt: Option<&Weak<Rail>>) {
        let device_opt = rail_opt
            .and_then(Weak::upgrade)
            .map(|rail| Arc::clone(rail.device()));
        let mut spin = SHORTEST_SPIN;
        let mut active: Vec<Arc<Endpoint>> = Vec::new();
        let mut looked = Instant::now();
        while !self.is_over.load(Ordering::Acquire) {
            while let Some(number) = self.channel.next_event() {
                let found = self.lock().get(&number).and_then(Weak::upgrade);
                if let Some(endpoint) = found {
                    endpoint.process();
                    if !active.iter().any(|known| Arc::ptr_eq(known, &endpoint)) {
                        active.push(endpoint);
                    }
                }
            }
            if let (Some(rail), Some(device)) = (rail_opt.and_then(Weak::upgrade), &device_opt) {
                while let Some(event) = device.next_event() {
                    rail.heard(event);
                }
            }
            active.retain(|endpoint| endpoint.is_busy());
            // Also while others keep this thread busy.
            if looked.elapsed() >= TICK {
                looked = Instant::now();
                let endpoints = self.endpoints();
                let busy = endpoints.iter().filter(|endpoint| endpoint.is_busy());
                busy.for_each(|endpoint| endpoint.look_for_stuck());
            }
            if look_on(&active, spin) {
                spin = (spin * 2).min(LONGEST_SPIN);
                continue;
            }
            spin = (spin / 2).max(SHORTEST_SPIN);
            self.sleep(device_opt.as_deref());
            active.clear();
        }
        // What is still posted is flushed by whoever drops the endpoint.
    }

    /// Sleeps until there is an event, or until it is time to look for stuck work.
    fn sleep(&self, device_opt: Option<&Device>) {
        self.sleeps_long.store(true, Ordering::SeqCst);
        let endpoints = self.endpoints();
        let is_busy = endpoints.iter().any(|endpoint| endpoint.is_busy());
        let timeout_opt = is_busy.then_some(TICK);
        if is_busy {
            self.sleeps_long.store(false, Ordering::SeqCst);
        }
        drop(endpoints);
        let channel = (self.channel.as_fd(), Interest::Readable);
        let wake = (self.wake.as_fd(), Interest::Readable);
        let woken = match device_opt {
            None => sys::wait_for([channel, wake], timeout_opt).map(|ready| ready[1]),
            Some(device) => {
                let events = (device.as_fd(), Interest::Readable);
                sys::wait_for([channel, wake, events], timeout_opt).map(|ready| ready[1])
            }
        };
        match woken {
            Ok(true) => {
                // Takes the count back to zero; what it was does not matter.
                let _ = (&self.wake).read(&mut [0; 8]);
            }
            Ok(false) => {}
            Err(error) => {
                tracing::error!(%error, "a completion thread cannot wait");
                std::thread::sleep(TICK);
            }
        }
    }
}

/// Polls for a while; whether anything came. Events stay armed, so that nothing is missed after.
fn look_on(active: &[Arc<Endpoint>], spin: Duration) -> bool {
    if active.is_empty() {
        return false;
    }
    let until = Instant::now() + spin;
    loop {
        let came = active.iter().filter(|endpoint| endpoint.process_polled());
        if came.count() > 0 {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::hint::spin_loop();
    }
}
