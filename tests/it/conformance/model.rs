//! Models by their logical shape, and what each byte of a rank's buffers must be.
//!
//! Written from the shapes alone: nothing here uses the planner. An item (a page, slot or row) is
//! a list of pieces; a piece has logical coordinates, and the same coordinates have the same bytes
//! on every rank of both sides.

use std::ops::Range;

use common::ids::ByteLen;
use common::schema::{AttentionKind, KvLayout, RankLayout, StateKind, StateLayout, TensorLayout};
use serde_json::{Value, json};

/// How KV is kept.
#[derive(Clone, Copy, Debug)]
pub enum Attention {
    /// K and V of some heads.
    Heads { heads: u32, head_bytes: u32 },
    /// One latent row for each token, the same on every rank.
    Latent { token_bytes: u32 },
}

/// A state component.
#[derive(Clone, Debug)]
pub enum State {
    /// Convolution and recurrent state of gated delta nets, sharded.
    Mamba {
        layers: u32,
        conv_groups: [u32; 3],
        channel_bytes: u32,
        recurrent_heads: u32,
        head_bytes: u32,
        /// Whether there is one more tensor, which every rank holds alike.
        is_partly_replicated: bool,
    },
    /// K and V pages of a sliding window, sharded by heads.
    Window {
        layers: u32,
        heads: u32,
        head_bytes: u32,
    },
    /// Items that every rank holds alike.
    Whole {
        kind: StateKind,
        tensors: u32,
        item_len: u32,
    },
}

/// A model.
#[derive(Clone, Debug)]
pub struct Model {
    pub page_size: u32,
    pub layers: u32,
    pub attention: Attention,
    pub states: Vec<State>,
    pub aux: Vec<u32>,
}

/// Items of every buffer.
pub const ITEMS: u32 = 16;

impl Model {
    /// K and V alone.
    pub fn dense() -> Self {
        Self {
            page_size: 4,
            layers: 2,
            attention: Attention::Heads {
                heads: 4,
                head_bytes: 8,
            },
            states: Vec::new(),
            aux: vec![64, 128],
        }
    }

    /// K and V, gated delta nets and a window.
    pub fn hybrid() -> Self {
        let window = State::Window {
            layers: 1,
            heads: 4,
            head_bytes: 8,
        };
        Self {
            states: vec![Self::delta_nets(true), window],
            ..Self::dense()
        }
    }

    /// K and V with gated delta nets.
    pub fn sharded_hybrid() -> Self {
        Self {
            states: vec![Self::delta_nets(false)],
            ..Self::dense()
        }
    }

    /// Gated delta nets.
    pub fn delta_nets(is_partly_replicated: bool) -> State {
        State::Mamba {
            layers: 2,
            conv_groups: [8, 8, 16],
            channel_bytes: 6,
            recurrent_heads: 8,
            head_bytes: 32,
            is_partly_replicated,
        }
    }

    /// Latent KV with the pages of a sparse-attention indexer.
    pub fn latent() -> Self {
        Self {
            attention: Attention::Latent { token_bytes: 24 },
            states: vec![State::Whole {
                kind: StateKind::Dsa,
                tensors: 2,
                item_len: 40,
            }],
            ..Self::dense()
        }
    }
}

/// A rank's place in its engine.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub tp_size: u32,
    pub tp_rank: u32,
    pub dcp_size: u32,
    pub dcp_rank: u32,
}

impl Place {
    pub const ALONE: Self = Self {
        tp_size: 1,
        tp_rank: 0,
        dcp_size: 1,
        dcp_rank: 0,
    };
}

/// The part of an item that lies in one piece on every rank.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Hash of the coordinates.
    key: u64,
    /// Which token of its page it belongs to.
    token: u32,
    len: u32,
}

/// One buffer of a rank.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// As `peer.py` calls it: `kv.0`, `state.1.0`, `aux.0`.
    pub name: String,
    /// Which list of indices it is addressed by.
    pub list: List,
    pieces: Vec<Piece>,
    dim: u32,
    conv_groups: Option<Vec<u32>>,
}

/// Which list of a request's indices addresses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    Kv,
    State(usize),
    Aux,
}

/// Where a request lies on one side.
#[derive(Clone, Debug)]
pub struct Placement {
    pub pages: Vec<i32>,
    pub states: Vec<Vec<i32>>,
    /// Negative for none.
    pub aux: i32,
}

/// All buffers of a rank.
#[derive(Clone, Debug)]
pub struct Shape {
    model: Model,
    place: Place,
    pub buffers: Vec<Buffer>,
}

/// Spreads bits (the finaliser of splitmix64).
const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn hash(coordinates: &[u64]) -> u64 {
    let start = 0x9e37_79b9_7f4a_7c15;
    coordinates.iter().fold(start, |state: u64, coordinate| {
        mix(state.rotate_left(17) ^ coordinate.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    })
}

/// Writes the bytes that belong to a key.
fn write_bytes(key: u64, out: &mut [u8]) {
    for (word, part) in out.chunks_mut(8).enumerate() {
        let word = mix(key.wrapping_add(word as u64));
        part.copy_from_slice(&word.to_le_bytes()[..part.len()]);
    }
}

/// A rank's even share of something sharded.
fn share(whole: u32, place: Place) -> Range<u32> {
    let part = whole / place.tp_size;
    place.tp_rank * part..(place.tp_rank + 1) * part
}

/// A rank's KV heads; where ranks exceed heads, neighbours hold the same one.
fn head_share(heads: u32, place: Place) -> Range<u32> {
    let first = place.tp_rank * heads / place.tp_size;
    first..first + (heads / place.tp_size).max(1)
}

/// Tells families of pieces apart.
mod family {
    pub const KV: u64 = 1;
    pub const CONV: u64 = 2;
    pub const RECURRENT: u64 = 3;
    pub const REPLICATED: u64 = 4;
    pub const WHOLE: u64 = 5;
    pub const AUX: u64 = 6;
    pub const WINDOW: u64 = 7;
}

impl Shape {
    pub fn new(model: &Model, place: Place) -> Self {
        let mut shape = Self {
            model: model.clone(),
            place,
            buffers: Vec::new(),
        };
        match model.attention {
            Attention::Heads { heads, head_bytes } => {
                shape.paged_heads("kv", List::Kv, family::KV, model.layers, heads, head_bytes);
            }
            Attention::Latent { token_bytes } => {
                for layer in 0..model.layers {
                    let pieces = (0..model.page_size).map(|token| Piece {
                        key: hash(&[family::KV, layer.into()]),
                        token,
                        len: token_bytes,
                    });
                    shape.add(format!("kv.{layer}"), List::Kv, pieces.collect());
                }
            }
        }
        for (component, state) in model.states.iter().enumerate() {
            shape.state(component, state);
        }
        for (position, len) in model.aux.iter().enumerate() {
            let piece = Piece {
                key: hash(&[family::AUX, position as u64]),
                token: 0,
                len: *len,
            };
            shape.add(format!("aux.{position}"), List::Aux, vec![piece]);
        }
        shape
    }

    fn add(&mut self, name: String, list: List, pieces: Vec<Piece>) {
        self.buffers.push(Buffer {
            name,
            list,
            pieces,
            dim: 0,
            conv_groups: None,
        });
    }

    fn paged_heads(
        &mut self,
        prefix: &str,
        list: List,
        family: u64,
        layers: u32,
        heads: u32,
        head_bytes: u32,
    ) {
        let own = head_share(heads, self.place);
        for position in 0..2 * layers {
            let tokens = 0..self.model.page_size;
            let pieces = tokens.flat_map(|token| {
                own.clone().map(move |head| Piece {
                    key: hash(&[family, position.into(), head.into()]),
                    token,
                    len: head_bytes,
                })
            });
            self.add(format!("{prefix}.{position}"), list, pieces.collect());
        }
    }

    fn state(&mut self, component: usize, state: &State) {
        let (prefix, list) = (format!("state.{component}"), List::State(component));
        match state {
            State::Window {
                layers,
                heads,
                head_bytes,
            } => self.paged_heads(&prefix, list, family::WINDOW, *layers, *heads, *head_bytes),
            State::Whole {
                tensors, item_len, ..
            } => {
                for position in 0..*tensors {
                    let piece = Piece {
                        key: hash(&[family::WHOLE, position.into()]),
                        token: 0,
                        len: *item_len,
                    };
                    self.add(format!("{prefix}.{position}"), list, vec![piece]);
                }
            }
            State::Mamba {
                layers,
                conv_groups,
                channel_bytes,
                recurrent_heads,
                head_bytes,
                is_partly_replicated,
            } => {
                let unit = |family: u64, layer: u32, number: u32, len: u32| Piece {
                    key: hash(&[family, layer.into(), number.into()]),
                    token: 0,
                    len,
                };
                let mut starts = 0;
                let mut channels = Vec::new();
                for group in conv_groups {
                    let own = share(*group, self.place);
                    channels.extend(own.map(|channel| starts + channel));
                    starts += group;
                }
                let heads: Vec<u32> = share(*recurrent_heads, self.place).collect();
                for layer in 0..*layers {
                    let pieces = channels.iter();
                    let pieces =
                        pieces.map(|channel| unit(family::CONV, layer, *channel, *channel_bytes));
                    self.add(format!("{prefix}.{layer}"), list, pieces.collect());
                    let added = self.buffers.last_mut().expect("one was added");
                    added.dim = channels.len() as u32;
                    added.conv_groups = Some(conv_groups.to_vec());
                }
                for layer in 0..*layers {
                    let pieces = heads.iter();
                    let pieces =
                        pieces.map(|head| unit(family::RECURRENT, layer, *head, *head_bytes));
                    let position = layers + layer;
                    self.add(format!("{prefix}.{position}"), list, pieces.collect());
                    self.buffers.last_mut().expect("one was added").dim = heads.len() as u32;
                }
                if *is_partly_replicated {
                    let whole = unit(family::REPLICATED, 0, 0, 20);
                    self.add(format!("{prefix}.{}", 2 * layers), list, vec![whole]);
                }
            }
        }
    }

    fn of_list(&self, list: List) -> impl Iterator<Item = &Buffer> {
        self.buffers
            .iter()
            .filter(move |buffer| buffer.list == list)
    }

    /// The buffers as a rank of ours describes them.
    pub fn layout(&self) -> RankLayout {
        let tensors = |list: List| self.of_list(list).map(Buffer::layout).collect::<Vec<_>>();
        let (attention, heads) = match self.model.attention {
            Attention::Heads { heads, .. } => (AttentionKind::Mha, heads),
            Attention::Latent { .. } => (AttentionKind::Mla, 1),
        };
        let states = self.model.states.iter().enumerate();
        RankLayout {
            page_size: self.model.page_size,
            kv: KvLayout {
                tensors: tensors(List::Kv),
                layer_ids: Vec::new(),
                start_layer: 0,
                num_draft_entries: 0,
                attention,
                head_num: head_share(heads, self.place).len() as u32,
                total_head_num: heads,
            },
            aux: tensors(List::Aux),
            states: states
                .map(|(component, state)| {
                    let list = List::State(component);
                    let (kind, is_slot) = match state {
                        State::Mamba { .. } => (StateKind::Mamba, true),
                        State::Window { .. } => (StateKind::Swa, false),
                        State::Whole { kind, .. } => (*kind, false),
                    };
                    let of_slot = |of: fn(&Buffer) -> u32| -> Vec<u32> {
                        self.of_list(list).filter(|_| is_slot).map(of).collect()
                    };
                    StateLayout {
                        kind,
                        tensors: tensors(list),
                        dims: of_slot(|buffer| buffer.dim),
                        outer_counts: of_slot(|_| 1),
                        conv_shard_groups: self
                            .of_list(list)
                            .filter(|_| is_slot)
                            .map(|buffer| buffer.conv_groups.clone())
                            .collect(),
                        layer_ids: Vec::new(),
                    }
                })
                .collect(),
        }
    }

    /// The same for `peer.py`.
    pub fn sglang_args(&self) -> Value {
        let layout = self.layout();
        let items = |tensors: &[TensorLayout]| -> Vec<[u64; 2]> {
            let sizes = tensors.iter();
            sizes
                .map(|tensor| [u64::from(ITEMS), tensor.item_len.get()])
                .collect()
        };
        let states = layout.states.iter().map(|state| {
            json!({
                "type": state.kind.name(),
                "items": items(&state.tensors),
                "dims": state.dims,
                "outer": state.outer_counts,
                "conv": state.conv_shard_groups,
            })
        });
        let aux = layout
            .aux
            .iter()
            .map(|row| json!([row.item_len.get(), ITEMS]));
        json!({
            "layers": self.model.layers,
            "is_mla": layout.kv.attention == AttentionKind::Mla,
            "page_size": self.model.page_size,
            "pages": ITEMS,
            "item_len": layout.kv.tensors[0].item_len.get(),
            "heads": layout.kv.head_num,
            "total_heads": layout.kv.total_head_num,
            "tp_rank": self.place.tp_rank,
            "states": states.collect::<Vec<_>>(),
            "aux": aux.collect::<Vec<_>>(),
        })
    }

    /// What a buffer holds: a request in its items, and a background that differs everywhere else.
    /// `first_page` is the number of the request's first page that lies here.
    pub fn contents(
        &self,
        buffer: &Buffer,
        owner: u64,
        request_opt: Option<(u64, &Placement, u32)>,
    ) -> Vec<u8> {
        let item_len = buffer.item_len();
        let background = hash(&[
            owner,
            buffer
                .name
                .bytes()
                .fold(7, |sum, byte| mix(sum ^ u64::from(byte))),
        ]);
        let mut contents = vec![0; item_len * ITEMS as usize];
        write_bytes(background, &mut contents);
        let Some((request, placement, first_page)) = request_opt else {
            return contents;
        };
        let (indices, first_page) = match buffer.list {
            List::Kv => (placement.pages.as_slice(), first_page),
            List::State(component) => (placement.states[component].as_slice(), 0),
            List::Aux if placement.aux < 0 => return contents,
            List::Aux => (std::slice::from_ref(&placement.aux), 0),
        };
        for (ordinal, item) in (first_page..).zip(indices) {
            let mut at = *item as usize * item_len;
            for piece in &buffer.pieces {
                let key = hash(&[request, piece.key, self.token(buffer, ordinal, piece)]);
                let len = piece.len as usize;
                write_bytes(key, &mut contents[at..at + len]);
                at += len;
            }
        }
        contents
    }

    /// The token of a request that a piece belongs to; the number of the item for what is not paged.
    fn token(&self, buffer: &Buffer, ordinal: u32, piece: &Piece) -> u64 {
        let in_rank = u64::from(ordinal) * u64::from(self.model.page_size) + u64::from(piece.token);
        match buffer.list {
            List::Kv => in_rank * u64::from(self.place.dcp_size) + u64::from(self.place.dcp_rank),
            List::State(_) | List::Aux => in_rank,
        }
    }
}

impl Buffer {
    pub fn item_len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len as usize).sum()
    }

    /// Bytes of the whole buffer.
    pub fn byte_len(&self) -> u64 {
        self.item_len() as u64 * u64::from(ITEMS)
    }

    fn layout(&self) -> TensorLayout {
        TensorLayout {
            bytes: ByteLen(self.byte_len()),
            item_len: ByteLen(self.item_len() as u64),
        }
    }
}
