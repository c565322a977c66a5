//! The fields of a JSON body, strictly: integers are integers, and nothing is guessed.

use serde_json::{Map, Value};

/// Characters of a client's text that a message shows.
const MAX_SHOWN: usize = 64;

/// What is wrong with a body, in words.
pub type FieldError = String;

/// Decodes a body: UTF-8, or UTF-16 with a byte order mark.
///
/// # Errors
/// When it is neither, or no JSON object.
pub fn object(body: &[u8]) -> Result<Map<String, Value>, FieldError> {
    let value: Value = match body {
        [0xff, 0xfe, rest @ ..] => parse(&utf16(rest, u16::from_le_bytes)?)?,
        [0xfe, 0xff, rest @ ..] => parse(&utf16(rest, u16::from_be_bytes)?)?,
        _ => {
            serde_json::from_slice(body).map_err(|error| format!("the body is no JSON: {error}"))?
        }
    };
    match value {
        Value::Object(map) => Ok(map),
        other => Err(format!(
            "the body is {}, expected a JSON object",
            kind(&other)
        )),
    }
}

fn parse(text: &str) -> Result<Value, FieldError> {
    serde_json::from_str(text).map_err(|error| format!("the body is no JSON: {error}"))
}

fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, FieldError> {
    let (units, rest) = bytes.as_chunks::<2>();
    let units: Vec<u16> = units.iter().map(|bytes| unit(*bytes)).collect();
    match String::from_utf16(&units) {
        Ok(text) if rest.is_empty() => Ok(text),
        _ => Err("the body is no UTF-16".to_owned()),
    }
}

/// Text of a client for a message: it may be long.
fn shown(text: &str) -> String {
    let mut characters = text.chars();
    let begin: String = characters.by_ref().take(MAX_SHOWN).collect();
    match characters.next() {
        Some(_) => format!("{begin}..."),
        None => begin,
    }
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => format!("{flag}"),
        Value::Number(number) => shown(&number.to_string()),
        Value::String(text) => format!("{:?}", shown(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

fn required<'a>(map: &'a Map<String, Value>, name: &str) -> Result<&'a Value, FieldError> {
    map.get(name).ok_or_else(|| format!("{name} is missing"))
}

/// An integer within bounds. No bool, float or text.
///
/// # Errors
/// When it is missing, something else, or out of bounds.
pub fn integer(
    map: &Map<String, Value>,
    name: &str,
    low: u64,
    high: u64,
) -> Result<u64, FieldError> {
    whole(required(map, name)?, name, low, high)
}

/// As [`integer`], for a value.
///
/// # Errors
/// As there.
pub fn whole(value: &Value, name: &str, low: u64, high: u64) -> Result<u64, FieldError> {
    let number = value.as_u64().filter(|_| value.is_u64() || value.is_i64());
    number
        .filter(|number| (low..=high).contains(number))
        .ok_or_else(|| {
            format!(
                "{name} is {}, expected an integer from {low} to {high}",
                kind(value)
            )
        })
}

/// An integer that may also come as plain ASCII digits in a string.
///
/// # Errors
/// As [`integer`].
pub fn integer_or_digits(
    map: &Map<String, Value>,
    name: &str,
    low: u64,
    high: u64,
) -> Result<u64, FieldError> {
    let value = required(map, name)?;
    let Value::String(text) = value else {
        return whole(value, name, low, high);
    };
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text
        .parse()
        .ok()
        .filter(|number| digits && (low..=high).contains(number));
    number.ok_or_else(|| {
        let shown = shown(text);
        format!("{name} is {shown:?}, expected an integer from {low} to {high}")
    })
}

/// A string that is not empty.
///
/// # Errors
/// When it is missing or something else.
pub fn text(map: &Map<String, Value>, name: &str) -> Result<String, FieldError> {
    match required(map, name)? {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        other => Err(format!("{name} is {}, expected text", kind(other))),
    }
}

/// A string, or nothing when it is null or missing.
///
/// # Errors
/// When it is something else.
pub fn optional_text(map: &Map<String, Value>, name: &str) -> Result<Option<String>, FieldError> {
    match map.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(format!("{name} is {}, expected text or null", kind(other))),
    }
}

/// A flag, false when it is null or missing.
///
/// # Errors
/// When it is something else.
pub fn flag(map: &Map<String, Value>, name: &str) -> Result<bool, FieldError> {
    match map.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(format!("{name} is {}, expected true or false", kind(other))),
    }
}

/// A port, or nothing when it is null or missing.
///
/// # Errors
/// When it is something else.
pub fn optional_port(map: &Map<String, Value>, name: &str) -> Result<Option<u16>, FieldError> {
    match map.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let port = whole(value, name, 0, u64::from(u16::MAX))?;
            Ok(u16::try_from(port).ok())
        }
    }
}
