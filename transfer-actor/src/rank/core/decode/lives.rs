//! Which process is behind a prefill rank, as far as that is known, and what its end proves.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use common::ids::{Endpoint, Room};
use common::wire::{ControlMessage, EngineDesc, Hello};

use crate::rank::core::decode::{DecodeCore, late};
use crate::rank::core::event::{Effect, Life, ResolvedPrefill};
use crate::rank::core::rules::{Rule, holds};

/// So many REGISTERs to one rank are told apart; what is known of the rooms before proves nothing.
const MOST_REGISTERS: usize = 8;

/// The numbers of the REGISTERs to one rank that may have reached a process, in order. One that could
/// not be sent is not among them, nor one before an answered one.
#[derive(Debug, Default)]
pub(super) struct Registers(VecDeque<u64>);

impl Registers {
    fn newest(&self) -> Option<u64> {
        self.0.back().copied()
    }

    fn sent(&mut self, number: u64) {
        if self.0.len() >= MOST_REGISTERS {
            self.0.pop_front();
        }
        self.0.push_back(number);
    }

    fn answered(&mut self, number: u64) {
        self.0.retain(|known| *known >= number);
    }

    fn not_sent(&mut self, number: u64) {
        self.0.retain(|known| *known != number);
    }
}

/// A Ferry prefill rank that has answered.
#[derive(Debug)]
pub(super) struct Met {
    pub engine: EngineDesc,
    pub life: Life,
    /// The REGISTER that it answered last.
    pub register: u64,
    /// Whether nothing has gone wrong since it answered last.
    pub is_current: bool,
    /// Whether it lets its bytes be compared.
    pub compares: bool,
}

/// What is known of the process that may write for a room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    /// The newest REGISTER of which it is known that this process answered it. Another process
    /// writes for the room only if a newer one has reached it.
    pub register: u64,
    pub life_opt: Option<Life>,
    /// Whether it has exited.
    pub has_exited: bool,
}

impl DecodeCore {
    /// A REGISTER for a rank that is not known to have one.
    pub(super) fn register_at(&mut self, endpoint: &Endpoint) -> Option<ControlMessage> {
        if self.registered.contains(endpoint) {
            return None;
        }
        if self.registers.len() >= self.limits.peers {
            // Whatever is forgotten proves nothing any more.
            let registered = &self.registered;
            self.registers.retain(|known, _| registered.contains(known));
        }
        self.registered.insert(endpoint.clone());
        self.last_register += 1;
        let registers = self.registers.entry(endpoint.clone()).or_default();
        registers.sent(self.last_register);
        let mut register = self.identity.register.clone();
        register.engine = register
            .engine
            .with_rank_tag(self.last_register, self.identity.checks_opt);
        Some(ControlMessage::Register(Box::new(register)))
    }

    /// A prefill rank answers our REGISTER: it reads trailers, and this is its process.
    pub(super) fn hello(&mut self, hello: Hello) -> Vec<Effect> {
        let Hello {
            endpoint,
            engine,
            register,
            checks,
        } = hello;
        let is_answer = self.registered.contains(&endpoint)
            && self.newest_register(&endpoint) == Some(register);
        if !is_answer {
            return vec![late("hello")];
        }
        if let Some(registers) = self.registers.get_mut(&endpoint) {
            registers.answered(register);
        }
        let known = self.met.get(&endpoint);
        let same_opt = known.filter(|met| met.engine == engine);
        let known_life_opt = same_opt.map(|met| met.life);
        let life = known_life_opt.unwrap_or_else(|| {
            self.last_life += 1;
            Life(self.last_life)
        });
        if self.met.len() >= self.limits.peers {
            self.met.retain(|_, met| met.is_current);
        }
        self.met.insert(
            endpoint.clone(),
            Met {
                engine: engine.clone(),
                life,
                register,
                is_current: true,
                compares: checks.is_some(),
            },
        );
        for prefill in self.prefills.values_mut() {
            mark(prefill, &endpoint);
        }
        for state in self.rooms.values_mut() {
            if let Some(told) = state.told.get_mut(&endpoint) {
                if told.life_opt == Some(life) {
                    told.register = register;
                } else if told.life_opt.is_none() && told.register == register {
                    told.life_opt = Some(life);
                }
            }
            // What was announced without a generation is answered without one.
            if let Some(prefill) = state.prefill_opt.as_mut().filter(|_| !state.is_published) {
                mark(prefill, &endpoint);
            }
        }
        // A process that is watched already is not to be watched twice.
        let is_new = known_life_opt.is_none();
        let met = is_new.then(|| Effect::Met {
            endpoint,
            life,
            engine: Box::new(engine),
        });
        met.into_iter().collect()
    }

    /// What is known now of the process behind a rank.
    pub(super) fn told_at(&self, endpoint: &Endpoint) -> Option<Told> {
        let register = self.newest_register(endpoint)?;
        // A REGISTER without an answer may reach another process than the one before.
        let has_answered = |met: &&Met| met.is_current && met.register == register;
        let met_opt = self.met.get(endpoint).filter(has_answered);
        let life_opt = met_opt.map(|met| met.life);
        Some(Told {
            register,
            life_opt,
            has_exited: false,
        })
    }

    /// The newest REGISTER that may have reached the process behind a rank.
    pub(super) fn newest_register(&self, endpoint: &Endpoint) -> Option<u64> {
        self.registers.get(endpoint)?.newest()
    }

    /// What an answer of a bootstrap server does not say of its ranks.
    pub(super) fn mark_known(&self, prefill: &mut ResolvedPrefill) {
        for target in &mut prefill.targets {
            let met_opt = self.met.get(&target.endpoint);
            target.is_ferry |= met_opt.is_some_and(|met| met.is_current);
        }
    }

    /// A process is gone: what it had not finished never will be, and it writes no more.
    pub(super) fn peer_exited(
        &mut self,
        endpoint: &Endpoint,
        life: Life,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        if self.met.get(endpoint).is_some_and(|met| met.life == life) {
            self.forget_prefill(endpoint);
            self.met.remove(endpoint);
        }
        for state in self.rooms.values_mut() {
            if let Some(told) = state.told.get_mut(endpoint) {
                told.has_exited |= told.life_opt == Some(life) || !holds(Rule::ExitOfThisLife);
            }
        }
        self.settle_exits(endpoint, reason, now)
    }

    /// A REGISTER could not be sent: no process of that rank knows of it.
    pub(super) fn not_registered(
        &mut self,
        endpoint: &Endpoint,
        register_opt: Option<u64>,
        now: Instant,
    ) -> Vec<Effect> {
        let (Some(registers), Some(register)) = (self.registers.get_mut(endpoint), register_opt)
        else {
            return Vec::new();
        };
        registers.not_sent(register);
        // The exit of the process before may have come first.
        self.settle_exits(endpoint, "its process has exited", now)
    }

    /// Ends what exits prove: that of the process that was told counts for a room if no other one
    /// can have been told since.
    fn settle_exits(&mut self, endpoint: &Endpoint, reason: &str, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        let reason = format!("prefill rank {endpoint} is gone: {reason}");
        let newest_opt = self.newest_register(endpoint);
        let is_alone =
            |told: &Told| newest_opt == Some(told.register) || !holds(Rule::ExitOfThisLife);
        let told = self.rooms.iter().filter(|(_, state)| {
            let told_opt = state.told.get(endpoint);
            told_opt.is_some_and(|told| told.has_exited && is_alone(told))
        });
        let told: Vec<Room> = told.map(|(room, _)| *room).collect();
        for room in told {
            if let Some(state) = self.rooms.get_mut(&room) {
                let prefill = state.prefill_opt.as_ref();
                let targets = prefill.into_iter().flat_map(|prefill| &prefill.targets);
                let gone = targets.filter(|target| target.endpoint == *endpoint);
                state.exited.extend(gone.map(|target| target.unique_rank));
                // It is said once.
                state.told.remove(endpoint);
                effects.push(Effect::Changed { room });
            }
            if holds(Rule::PeerLossFails) {
                self.fail(room, &reason, now, &mut effects);
            }
        }
        effects
    }
}

/// Copies only what changes: rooms that share it keep what they began with.
fn mark(prefill: &mut Arc<ResolvedPrefill>, endpoint: &Endpoint) {
    let mut targets = prefill.targets.iter();
    if targets.any(|target| target.endpoint == *endpoint && !target.is_ferry) {
        let targets = &mut Arc::make_mut(prefill).targets;
        let known = targets
            .iter_mut()
            .filter(|target| target.endpoint == *endpoint);
        known.for_each(|target| target.is_ferry = true);
    }
}
