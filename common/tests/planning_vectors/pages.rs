//! Pages and lists of indices.

use common::plan::pages::{
    IndexRun, index_runs, item_run_list, pages_of_cp_rank, pages_of_shard_rank,
};
use common::wire::int_lists::{self, ListInteger};
use golden::list;
use serde_json::{Value, json};

use crate::{number, numbers, optional, or_null, section};

#[test]
fn pages() {
    section("group_concurrent_contiguous", |input| {
        let runs = index_runs::<i64>(&numbers(&input["src"]), &numbers(&input["dst"]));
        let value = or_null(runs, |runs| {
            let src: Vec<_> = runs.iter().map(|run| [run.src, run.count]).collect();
            let dst: Vec<_> = runs.iter().map(|run| [run.dst, run.count]).collect();
            json!([src, dst])
        });
        (value, None)
    });
    section("grouped_index_plan_from_indices", |input| {
        let item_len = number(&input["item_len"]);
        let planned = index_runs::<i64>(&numbers(&input["src"]), &numbers(&input["dst"]))
            .and_then(|runs| Ok((item_run_list(&runs, item_len)?, runs)));
        let value = or_null(planned, |(list, runs)| {
            let of = |field: fn(&IndexRun) -> u64| runs.iter().map(field).collect::<Vec<_>>();
            let ranges: Vec<_> = list.iter_ranges().collect();
            json!({
                "src_starts": of(|run| run.src),
                "dst_starts": of(|run| run.dst),
                "counts": of(|run| run.count),
                "local": ranges.iter().map(|range| range.src.0).collect::<Vec<_>>(),
                "remote": ranges.iter().map(|range| range.dst.0).collect::<Vec<_>>(),
                "sizes": ranges.iter().map(|range| range.len.0).collect::<Vec<_>>(),
            })
        });
        (value, None)
    });
    section("filter_kv_indices_for_cp_rank", |input| {
        let slice: Vec<usize> = numbers(&input["index_slice"]);
        let (pages, positions) = pages_of_cp_rank(
            &numbers(&input["kv_indices"]),
            slice[0]..slice[1],
            optional(&input["total_pages"]),
            number(&input["attn_cp_rank"]),
            number(&input["attn_cp_size"]),
        );
        (json!([pages, [positions.start, positions.end]]), None)
    });
    section("filter_kv_indices_for_shard_rank", |input| {
        let slice: Vec<usize> = numbers(&input["index_slice"]);
        let (pages, positions) = pages_of_shard_rank(
            &numbers(&input["kv_indices"]),
            slice[0],
            number(&input["shard_rank"]),
            number(&input["shard_size"]),
        );
        (json!([pages, positions]), None)
    });
}

/// Writes lists of one integer type; `None` where a value does not fit the type.
fn packed<T: ListInteger + TryFrom<i128>>(lists: &[Vec<i128>]) -> Option<Vec<u8>> {
    let lists: Option<Vec<Vec<T>>> = lists
        .iter()
        .map(|list| list.iter().map(|item| T::try_from(*item).ok()).collect())
        .collect();
    int_lists::pack_lists(&lists?, "test").ok()
}

fn unpacked<T: ListInteger + Into<i128>>(bytes: &[u8]) -> Option<Vec<Vec<i128>>> {
    let lists: Vec<Vec<T>> = int_lists::unpack_lists(bytes, "test").ok()?;
    Some(
        lists
            .into_iter()
            .map(|list| list.into_iter().map(Into::into).collect())
            .collect(),
    )
}

#[test]
fn lists_of_integers() {
    section("pack_int_lists", |input| {
        let lists: Vec<Vec<i128>> = list(input, "lists").iter().map(numbers).collect();
        let packed = match input["fmt"].as_str() {
            Some("i") => packed::<i32>(&lists),
            Some("I") => packed::<u32>(&lists),
            _ => packed::<u64>(&lists),
        };
        (
            packed.map_or(Value::Null, |frame| json!(hex::encode(frame))),
            None,
        )
    });
    for name in ["unpack_int_lists", "unpack_int_lists_malformed"] {
        section(name, |input| {
            let bytes = hex::decode(input["hex"].as_str().expect("hex")).expect("hex");
            let (lists, width) = match input["fmt"].as_str() {
                Some("i") => (unpacked::<i32>(&bytes), 4),
                Some("I") => (unpacked::<u32>(&bytes), 4),
                _ => (unpacked::<u64>(&bytes), 8),
            };
            // One section keeps integers as numbers, the other as decimal strings.
            let value = lists.map_or(Value::Null, |lists| {
                let shown = |item: &i128| {
                    if name.ends_with("malformed") {
                        json!(i64::try_from(*item).expect("a small number"))
                    } else {
                        json!(item.to_string())
                    }
                };
                lists
                    .iter()
                    .map(|list| list.iter().map(shown).collect::<Value>())
                    .collect()
            });
            // SGLang's reader takes what the lengths reach and no notice of what is left over.
            let loose = !bytes.is_empty() && !is_whole(&bytes) && python_reads(&bytes, width);
            (value, loose.then_some("int lists are whole: no short tail"))
        });
    }
}

/// Whether the lengths of a list of lists add up to the frame.
fn is_whole(bytes: &[u8]) -> bool {
    let (fields, _) = bytes.as_chunks::<4>();
    let mut fields = fields
        .iter()
        .map(|field| u32::from_le_bytes(*field) as usize);
    let count = fields.next().unwrap_or_default();
    let lengths: Vec<usize> = fields.take(count).collect();
    lengths.len() == count && bytes.len() == 4 + 4 * count + lengths.iter().sum::<usize>()
}

/// Whether every list that a lenient reader cuts out is a whole number of integers.
fn python_reads(bytes: &[u8], width: usize) -> bool {
    let (fields, _) = bytes.as_chunks::<4>();
    let mut fields = fields
        .iter()
        .map(|field| u32::from_le_bytes(*field) as usize);
    let Some(count) = fields.next() else {
        return false;
    };
    let lengths: Vec<usize> = fields.take(count).collect();
    let mut offset = 4 + 4 * count;
    lengths.len() == count
        && lengths.iter().all(|length| {
            let start = offset.min(bytes.len());
            offset += length;
            (offset.min(bytes.len()) - start).is_multiple_of(width)
        })
}
