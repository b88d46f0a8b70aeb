"""The shipped redactors: their findings, the texts they leave unchanged, and their time on a hostile text."""

from __future__ import annotations

import time

import pytest

from perdure import ConfigurationError, InvalidData, redactors
from perdure.redactors import DEFAULT, EMAILS, PHONES, Redactor

EVERY = (*DEFAULT, EMAILS, PHONES)
SECRETS = {
    "api-key": [
        "sk-abcdefghijklmnopqrstuvwx",
        "sk-proj-Ab_cd-0123456789abcdef",
        "sk-ant-api03-0123456789abcdef",
        "sk_live_0123456789abcdefAB",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "github_pat_0123456789abcdefghijABCDEFGHIJ",
        "glpat-0123456789abcdefghij",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-abcdefghij",
        "AIzaSyA0123456789abcdefghijABCDEFGHIJ01",
        "hf_0123456789abcdefghijABCDEFGHIJ01",
        "pdr_" + "a" * 43,
    ],
    "bearer-token": ["Bearer abcdefghijklmnop1234", "bearer  0123456789abcdef.~+/=-"],
    "web-token": ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"],
    "private-key": [
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIEow, and then the text ends",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nx\n-----END PGP PRIVATE KEY BLOCK-----",
    ],
    "card-number": [
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        "4111111111111111",
        "5555555555554444",
        "3782 822463 10005",
        "378282246310005",
        "2223003122003222",
        "6011111111111117",
        "3056 930902 5904",
    ],
    "email": ["ada.lovelace+notes@example.co.uk"],
    "phone": ["+47 22 12 34 56", "+1 (555) 010-9999"],
}
PLAIN = [
    "task-abcdefghijklmnopqrstuvwx",
    "sk-short",
    "a risk-benefit-analysis-of-things",
    "AKIA is a prefix",
    "the bearer of news came by",
    "eyJ is how JSON begins in base64",
    "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----",
    "4111 1111 1111 1112",
    "1234567890123456",
    "order 4111111111111111a",
    "2026-11-18T16:45:21.123456Z",
    "0190a1b2-4111-7111-8111-411111111111",
    "f" * 24 + "4111111111111111" + "f" * 24,
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_found_wherever_it_stands(name: str) -> None:
    """A secret is removed whole, in the middle of a sentence and at its beginning and end."""
    redactor = redactors.named(name)[0]
    for secret in SECRETS[name]:
        for text in (secret, f"key={secret}", f'say "{secret}"'):
            redacted, count = redactor.apply(text)
            assert count == 1, text
            if name != "private-key":  # one without an end takes the rest with it
                assert redacted == text.replace(secret, redactor.replacement)
            assert secret not in redacted


@pytest.mark.parametrize("text", PLAIN)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    """The default set leaves words, dates, ids, hashes and numbers with a wrong checksum alone."""
    assert [redactor.apply(text)[0] for redactor in DEFAULT] == [text] * len(DEFAULT)


def test_a_card_is_found_behind_other_numbers() -> None:
    """A group of digits before a card number does not hide it."""
    assert redactors.CARD_NUMBERS.apply("2345 4111 1111 1111 1111") == ("2345 [redacted:card-number]", 1)


def test_redacting_again_changes_nothing() -> None:
    """No redactor changes another's replacement."""
    text = " ".join(secret for several in SECRETS.values() for secret in several)
    for redactor in EVERY:
        text = redactor.apply(text)[0]
    assert [redactor.apply(text) for redactor in EVERY] == [(text, 0)] * len(EVERY)


HOSTILE = [
    *("sk-", "sk-a ", "AKIA", "ghp_", "eyJ", "eyJ.", "eyJaaaaaaaa.", "Bearer ", "-----BEGIN ", "-"),
    *(
        "-----BEGIN PRIVATE KEY-----",
        "4111 ",
        "4 ",
        "4-",
        "4",
        "4111111111111112 ",
        "a",
        "a@",
        "a@a.",
        "@",
        "+1",
        "+1 ",
    ),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("piece", HOSTILE)
def test_a_hostile_text_takes_time_in_proportion(piece: str) -> None:
    """A text of 1 MB made to cause backtracking takes each redactor less than two seconds."""
    text = piece * (1_000_000 // len(piece)) + "!"
    for redactor in EVERY:
        began = time.process_time()
        redactor.apply(text)
        redactor.held_from(text[:-1], 0)
        assert time.process_time() - began < 2.0, redactor  # on a busy machine; a quadratic one takes minutes


def test_redactors_are_found_by_name() -> None:
    """`default` means the default set, and the error for an unknown name lists the known ones."""
    assert redactors.named("default") == DEFAULT
    assert redactors.named("email", "default", "email") == (EMAILS, *DEFAULT)
    with pytest.raises(ConfigurationError, match="There are: default, private-key, api-key"):
        redactors.named("passwords")


def test_a_redactor_of_ones_own() -> None:
    """It needs a pattern, a replacement and a check."""
    own = Redactor("case", r"CASE-\d{6}", "CASE-…", check=lambda found: found != "CASE-000000", hints=("CASE-",))
    assert own.apply("CASE-123456 and CASE-000000") == ("CASE-… and CASE-000000", 1)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"name": "", "pattern": "x"}, "$.name"),
        ({"name": "a", "pattern": "("}, "$.pattern"),
        ({"name": "a", "pattern": b"x"}, "$.pattern"),
        ({"name": "a", "pattern": "[a-z]+", "replacement": "gone"}, "$.replacement"),
        ({"name": "a", "pattern": "x", "hints": "x"}, "$.hints"),
        ({"name": "a", "pattern": "x", "hints": ['"']}, "$.hints[0]"),
        ({"name": "a", "pattern": "x", "span": 0}, "$.span"),
    ],
)
def test_a_wrong_redactor_is_refused(options: dict[str, object], path: str) -> None:
    """A redactor that could not work is InvalidData when it is made."""
    with pytest.raises(InvalidData) as caught:
        Redactor(**options)  # type: ignore[arg-type]  # that is what is tested
    assert caught.value.path == path
