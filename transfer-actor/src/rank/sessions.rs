//! A rank's sessions to its peers' engines.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use common::wire::EngineDesc;
use futures::FutureExt;
use io_engine::{Engine, Reach, Session, TransportError, TransportErrorKind, TransportKind};

use crate::component::SharedSession;
use crate::rank::SessionSummary;

/// Time from the first failed attempt to the next one; it doubles with each failure.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// A peer that nobody wants to reach any more is forgotten after this time.
const FORGET_AFTER: Duration = Duration::from_secs(60);

/// Sessions by the key of the peer's engine and what they reach. Each is opened once, on a thread
/// that may block, and again when it has died; a peer that cannot be reached is tried again only
/// after a while, and until then fails at once with the last reason.
#[derive(Default)]
pub(super) struct Sessions(HashMap<(String, Reach), Attempt>);

struct Attempt {
    session: SharedSession,
    began: Instant,
    /// How many attempts before this one failed, one after the other.
    failures: u32,
    /// From 0.75 to 1.25, so that ranks do not try together.
    jitter: f64,
}

impl Attempt {
    /// `others` are to the same peer; one of them is taken if it is over the transport that would
    /// be chosen.
    fn begin(
        engine: &Engine,
        (desc, reach): (&EngineDesc, &Reach),
        others: Vec<SharedSession>,
        failures: u32,
        now: Instant,
    ) -> Self {
        let (engine, desc, reach) = (engine.clone(), desc.clone(), reach.clone());
        let opened = async move {
            let others = futures::future::join_all(others).await;
            let others: Vec<Session> = others.into_iter().filter_map(Result::ok).collect();
            let connect = move || engine.connect_for(&desc, &reach, &others);
            let joined = tokio::task::spawn_blocking(connect).await;
            joined.unwrap_or_else(|error| {
                Err(TransportError::quiesced(
                    TransportErrorKind::Io,
                    format!("opening the session: {error}"),
                ))
            })
        };
        let random = getrandom::u32().unwrap_or(u32::MAX / 2);
        Self {
            session: opened.boxed().shared(),
            began: now,
            failures,
            jitter: 0.75 + 0.5 * f64::from(random) / f64::from(u32::MAX),
        }
    }

    fn open(&self) -> Option<&Session> {
        let opened = self.session.peek()?.as_ref().ok()?;
        opened.is_alive().then_some(opened)
    }

    fn has_failed(&self) -> bool {
        matches!(self.session.peek(), Some(Err(_)))
    }

    fn next_at(&self) -> Instant {
        self.began + backoff(self.failures, self.jitter)
    }
}

fn backoff(failures: u32, jitter: f64) -> Duration {
    let doubled = FIRST_BACKOFF.saturating_mul(1 << failures.min(16));
    doubled.min(LONGEST_BACKOFF).mul_f64(jitter)
}

impl Sessions {
    /// The session to a peer's engine that reaches some memory.
    pub(super) fn to(
        &mut self,
        engine: &Engine,
        desc: &EngineDesc,
        reach: &Reach,
        now: Instant,
    ) -> SharedSession {
        let name = (desc.key.clone(), reach.clone());
        let failures = match self.0.get(&name) {
            None => 0,
            Some(known) => {
                let is_pending = known.session.peek().is_none();
                let waits = known.has_failed() && now < known.next_at();
                if is_pending || waits || known.open().is_some() {
                    return known.session.clone();
                }
                // One that was open and died says nothing of the next.
                match known.has_failed() {
                    true => known.failures.saturating_add(1),
                    false => 0,
                }
            }
        };
        let others = self.0.iter();
        let others = others.filter(|((key, other), _)| *key == desc.key && other != reach);
        let others = others.map(|(_, attempt)| attempt.session.clone()).collect();
        let attempt = Attempt::begin(engine, (desc, reach), others, failures, now);
        let session = attempt.session.clone();
        self.0.insert(name, attempt);
        session
    }

    /// Lets go of sessions that died, and of failures that are long over.
    pub(super) fn tidy(&mut self, now: Instant) {
        self.0.retain(|_, attempt| {
            let is_pending = attempt.session.peek().is_none();
            let is_remembered = attempt.has_failed() && now < attempt.next_at() + FORGET_AFTER;
            is_pending || is_remembered || attempt.open().is_some()
        });
    }

    /// Open sessions, each once.
    fn open(&self) -> Vec<&Session> {
        let mut seen = HashSet::new();
        let open = self.0.values().filter_map(Attempt::open);
        open.filter(|session| seen.insert(session.connection()))
            .collect()
    }

    /// Open sessions of each transport, in the order of [`TransportKind::ALL`].
    pub(super) fn count(&self) -> [i64; TransportKind::ALL.len()] {
        let open = self.open();
        TransportKind::ALL.map(|kind| {
            let open = open.iter();
            open.filter(|session| session.transport() == kind).count() as i64
        })
    }

    /// Open sessions, for people.
    pub(super) fn list(&self) -> Vec<SessionSummary> {
        let open = self.open().into_iter();
        let mut listed: Vec<_> = open
            .map(|session| SessionSummary {
                peer: session.peer_key().to_owned(),
                transport: session.transport().name().to_owned(),
                passed_over: session
                    .passed_over()
                    .iter()
                    .map(|(kind, why)| format!("{kind}: {why}"))
                    .collect(),
            })
            .collect();
        listed.sort_by(|one, other| one.peer.cmp(&other.peer));
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_engine::EngineConfig;

    fn engine(key: &str, kind: TransportKind) -> Engine {
        let mut config = EngineConfig::new(key, "127.0.0.1");
        config.tcp_bind = ([127, 0, 0, 1], 0).into();
        config.transports = vec![TransportKind::Shm, kind];
        Engine::start(config).expect("an engine starts")
    }

    #[actix_rt::test]
    async fn a_session_is_shared_and_opened_again_when_it_died() {
        let (own, peer) = (
            engine("own", TransportKind::Tcp),
            engine("peer", TransportKind::Tcp),
        );
        let (desc, now) = (peer.desc(), Instant::now());
        let mut sessions = Sessions::default();
        let first = sessions
            .to(&own, &desc, &Reach::default(), now)
            .await
            .expect("opens");
        sessions
            .to(&own, &desc, &Reach::default(), now)
            .await
            .expect("is the same");
        assert_eq!(sessions.count().iter().sum::<i64>(), 1);
        assert_eq!(sessions.list()[0].transport, "shm");
        assert_eq!(sessions.list().len(), 1);
        first.close();
        assert_eq!(sessions.count().iter().sum::<i64>(), 0);
        let again = sessions
            .to(&own, &desc, &Reach::default(), now)
            .await
            .expect("opens again");
        assert!(again.is_alive() && !first.is_alive());
        drop(peer);
        again.close();
        sessions.tidy(now);
        assert!(sessions.0.is_empty());
    }

    #[actix_rt::test]
    async fn a_peer_out_of_reach_is_tried_again_after_longer_and_longer_times() {
        let own = engine("own", TransportKind::Tcp);
        let gone = engine("gone", TransportKind::Tcp);
        let desc = gone.desc();
        gone.shutdown();
        let (mut sessions, mut now) = (Sessions::default(), Instant::now());
        let gone = ("gone".to_owned(), Reach::default());
        for failures in 0..12 {
            let error = sessions
                .to(&own, &desc, &Reach::default(), now)
                .await
                .expect_err("fails");
            assert_eq!(error.kind(), TransportErrorKind::NoCommonTransport);
            let attempt = &sessions.0[&gone];
            assert_eq!((attempt.failures, attempt.began), (failures, now));
            let next = attempt.next_at();
            // Until then the same failure is told again, and nothing is tried.
            let before = next - Duration::from_millis(1);
            assert!(
                sessions
                    .to(&own, &desc, &Reach::default(), before)
                    .await
                    .is_err()
            );
            assert_eq!(sessions.0[&gone].began, now);
            now = next;
        }
        sessions.tidy(now);
        assert_eq!(sessions.0.len(), 1, "it is remembered for a while");
        sessions.tidy(now + FORGET_AFTER);
        assert!(sessions.0.is_empty());
    }

    #[test]
    fn the_wait_doubles_to_its_limit() {
        let waits: Vec<_> = [0, 1, 2, 7, 40]
            .map(|failures| backoff(failures, 1.0).as_millis())
            .into();
        assert_eq!(waits, [100, 200, 400, 10_000, 10_000]);
        assert!(backoff(3, 0.75) < backoff(3, 1.25));
    }
}
