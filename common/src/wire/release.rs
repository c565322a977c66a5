//! The wire by SGLang release, as a table (`spec/control-plane.md`, last section).

/// A row of the table: releases that share one form of every message. Ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Release {
    /// 0.5.12 and before: one flat list of state descriptors. Recognised and refused.
    Flat0512,
    /// 0.5.13: nested by component; TRANSFER_INFO has 9 frames.
    Nested0513,
    /// 0.5.15 to 0.5.18: TRANSFER_INFO has `decode_prefix_len`.
    Prefix0515,
    /// 0.5.19 to 0.5.21: ABORT is answered.
    Ack0519,
    /// 0.5.22 and 0.5.23: REGISTER has 18 frames; ABORT carries a generation.
    Dcp0522,
}

/// What the messages of one release look like. Frame counts include the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseForm {
    /// The releases, for people.
    pub name: &'static str,
    /// Frames of a REGISTER.
    pub register_frames: usize,
    /// Whether state frames hold one list for each component.
    pub nested_state: bool,
    /// Frames of a TRANSFER_INFO.
    pub transfer_info_frames: usize,
    /// Whether ABORT names the decode's endpoint.
    pub abort_endpoint: bool,
    /// Whether ABORT and ABORT_ACK carry a generation.
    pub abort_generation: bool,
}

impl Release {
    /// Every row, oldest first.
    pub const ALL: [Self; 5] = [
        Self::Flat0512,
        Self::Nested0513,
        Self::Prefix0515,
        Self::Ack0519,
        Self::Dcp0522,
    ];

    /// The newest form; what Ferry speaks unless a peer is older.
    pub const NEWEST: Self = Self::Dcp0522;

    /// The row.
    pub const fn form(self) -> ReleaseForm {
        let newest = ReleaseForm {
            name: "0.5.22 or later",
            register_frames: 18,
            nested_state: true,
            transfer_info_frames: 10,
            abort_endpoint: true,
            abort_generation: true,
        };
        match self {
            Self::Dcp0522 => newest,
            Self::Ack0519 => ReleaseForm {
                name: "0.5.19 to 0.5.21",
                register_frames: 14,
                abort_generation: false,
                ..newest
            },
            Self::Prefix0515 => ReleaseForm {
                name: "0.5.15 to 0.5.18",
                register_frames: 14,
                abort_generation: false,
                ..newest
            },
            Self::Nested0513 => ReleaseForm {
                name: "0.5.13 or later, before 0.5.22",
                register_frames: 14,
                transfer_info_frames: 9,
                abort_generation: false,
                ..newest
            },
            Self::Flat0512 => ReleaseForm {
                name: "0.5.12 or before",
                register_frames: 14,
                nested_state: false,
                transfer_info_frames: 9,
                abort_endpoint: false,
                abort_generation: false,
            },
        }
    }

    /// The releases of this row, for people.
    pub const fn name(self) -> &'static str {
        self.form().name
    }

    /// The oldest release whose REGISTER can have this many frames, nested state given. From 14 to
    /// 17 frames the message alone does not tell 0.5.13 from 0.5.21.
    pub(crate) const fn of_register(frames: usize) -> Self {
        if frames >= Self::Dcp0522.form().register_frames {
            Self::Dcp0522
        } else {
            Self::Nested0513
        }
    }
}
