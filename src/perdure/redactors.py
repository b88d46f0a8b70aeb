"""Redactors for `connect(redact=…)`, which find secrets in texts before they are stored."""

from perdure.redaction.redactors import API_KEYS as API_KEYS
from perdure.redaction.redactors import BEARER_TOKENS as BEARER_TOKENS
from perdure.redaction.redactors import CARD_NUMBERS as CARD_NUMBERS
from perdure.redaction.redactors import DEFAULT as DEFAULT
from perdure.redaction.redactors import EMAILS as EMAILS
from perdure.redaction.redactors import PHONES as PHONES
from perdure.redaction.redactors import PRIVATE_KEYS as PRIVATE_KEYS
from perdure.redaction.redactors import WEB_TOKENS as WEB_TOKENS
from perdure.redaction.redactors import Redactor as Redactor
from perdure.redaction.redactors import named as named
