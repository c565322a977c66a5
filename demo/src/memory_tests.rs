//! The check must pass on what a perfect transfer leaves, and find every kind of damage.

use super::*;
use crate::args::PoolMemory;
use crate::layout::Capacity;
use crate::model::{ModelName, ModelShape};

const SEED: u64 = 11;
const ROOM: u64 = 1 << 60;

fn memory(side: Side, tp_size: u32, tp_rank: u32) -> RankMemory {
    let model = ModelShape::new(ModelName::Hybrid, 0.01, 16);
    let capacity = Capacity {
        kv_pages: 6,
        sliding_pages: 5,
        requests: 4,
    };
    let layout = RankLayout::new(&model, side, tp_size, tp_rank, 4, capacity);
    RankMemory::allocate(layout, PoolMemory::Host, SEED).expect("there is memory")
}

fn placed() -> Vec<Placed> {
    vec![
        Placed {
            item: 3,
            ordinal: 0,
        },
        Placed {
            item: 1,
            ordinal: 1,
        },
    ]
}

fn mismatch(error: anyhow::Error) -> Mismatch {
    error.downcast().expect("the check found a wrong byte")
}

fn write(memory: &RankMemory, component: Component, offset: u64, bytes: &[u8]) {
    let (pool, _) = memory
        .layout
        .component(component)
        .expect("the model has it");
    memory.pools[pool]
        .write(ByteOffset(offset), bytes)
        .expect("it is inside");
}

#[test]
fn an_untouched_pool_and_a_perfect_one_pass() {
    let memory = memory(Side::Decode, 2, 1);
    let pool_bytes = |checked: &[(Component, CheckedBytes)]| {
        checked
            .iter()
            .map(|(_, checked)| checked.placed + checked.untouched)
            .sum::<u64>()
    };
    let before = memory.check_all().expect("nothing was written");
    assert_eq!(
        pool_bytes(&before),
        memory.layout.pool_bytes(),
        "every byte was compared"
    );
    assert!(before.iter().all(|(_, checked)| checked.placed == 0));

    for component in Component::ALL {
        // What `fill` writes is what the decode must find: the two sides' layouts are compared
        // with each other, by an independent way, in the tests of `layout`.
        memory.fill(component, ROOM, &placed()).expect("it fits");
        let bytes = memory
            .check_request(component, ROOM, &placed())
            .expect("it is all there");
        let (_, part) = memory
            .layout
            .component(component)
            .expect("the model has it");
        assert_eq!(bytes, 2 * part.item_bytes());
    }
    let after = memory
        .check_all()
        .expect("only what was placed has changed");
    assert_eq!(pool_bytes(&after), memory.layout.pool_bytes());
    assert!(
        after
            .iter()
            .all(|(_, checked)| checked.placed > 0 && checked.untouched > 0)
    );
}

#[test]
fn a_flipped_byte_is_found_wherever_it_lies() {
    let memory = memory(Side::Decode, 2, 0);
    for component in Component::ALL {
        memory.fill(component, ROOM, &placed()).expect("it fits");
    }
    for component in Component::ALL {
        let (pool, part) = memory
            .layout
            .component(component)
            .expect("the model has it");
        let mut offsets = vec![0, part.pool_bytes - 1];
        for tensor in &part.tensors {
            offsets.extend([
                tensor.offset - 1,
                tensor.offset,
                tensor.offset + 3 * tensor.item_len,
                tensor.offset + 4 * tensor.item_len - 1,
                tensor.offset + tensor.item_len * u64::from(part.items),
            ]);
        }
        for offset in offsets {
            let mut byte = [0_u8];
            memory.pools[pool]
                .read(ByteOffset(offset), &mut byte)
                .expect("it is inside");
            write(&memory, component, offset, &[byte[0] ^ 0x10]);
            let found = mismatch(memory.check_all().expect_err("a byte is wrong"));
            assert_eq!(
                (found.component, found.wrong_bytes),
                (component, 1),
                "offset {offset}"
            );
            assert_eq!((found.found, found.expected), (byte[0] ^ 0x10, byte[0]));
            write(&memory, component, offset, &byte);
        }
    }
    memory.check_all().expect("everything was put back");
}

#[test]
fn a_missing_write_is_told_from_a_wrong_one() {
    let memory = memory(Side::Decode, 2, 0);
    let error = memory
        .check_request(Component::Mamba, ROOM, &placed())
        .expect_err("nothing came");
    let found = mismatch(error);
    assert!(found.still_background);
    assert_eq!(
        found.expectation,
        Expectation::Delivered {
            room: ROOM,
            ordinal: 0,
            item: 3
        }
    );
    assert_eq!(
        (found.tensor.as_str(), found.offset),
        ("conv.layer0", 3 * 512 * 6)
    );

    memory
        .fill(Component::Mamba, ROOM + 1, &placed())
        .expect("it fits");
    let error = memory
        .check_request(Component::Mamba, ROOM, &placed())
        .expect_err("another's");
    assert!(!mismatch(error).still_background);
}

#[test]
fn another_ranks_or_another_pages_bytes_are_wrong() {
    let [mine, other] = [memory(Side::Decode, 2, 0), memory(Side::Decode, 2, 1)];
    for component in [Component::Kv, Component::Swa, Component::Mamba] {
        other.fill(component, ROOM, &placed()).expect("it fits");
        let (pool, part) = mine.layout.component(component).expect("the model has it");
        let mut all = vec![0_u8; part.pool_bytes as usize];
        other.pools[pool]
            .read(ByteOffset(0), &mut all)
            .expect("it is inside");
        mine.pools[pool]
            .write(ByteOffset(0), &all)
            .expect("it is inside");
        assert!(
            mine.check_request(component, ROOM, &placed()).is_err(),
            "{component}"
        );
        if component == Component::Mamba {
            // A request has one slot, so a slot has no place among others.
            continue;
        }
        let swapped = [
            Placed {
                item: 1,
                ordinal: 0,
            },
            Placed {
                item: 3,
                ordinal: 1,
            },
        ];
        assert!(
            other.check_request(component, ROOM, &swapped).is_err(),
            "{component}"
        );
    }
}

#[test]
fn the_injected_flip_is_found() {
    for component in Component::ALL {
        let memory = memory(Side::Decode, 1, 0);
        memory.flip_byte(component, 0).expect("it is inside");
        let found = mismatch(memory.check_all().expect_err("a byte is wrong"));
        assert_eq!(found.component, component);
        assert_eq!(found.expectation, Expectation::Untouched { item: 0 });
    }
}
