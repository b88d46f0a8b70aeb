"""The only way between the model and bytes, or plain data.

Bytes have one canonical form: UTF-8 JSON without defaults. Fields and parts that this release does not know are kept on
their value, and written back in the same place. This package alone decides what may be stored: finite numbers, whole
characters, bounded depth and size. Nothing is written that could not be read again.
"""

from perdure.codec.attachments import MOST_BYTES as MOST_BYTES
from perdure.codec.attachments import Attachment as Attachment
from perdure.codec.attachments import attached_post as attached_post
from perdure.codec.attachments import detached as detached
from perdure.codec.attachments import detached_post as detached_post
from perdure.codec.attachments import detached_raw as detached_raw
from perdure.codec.attachments import has_attachments as has_attachments
from perdure.codec.attachments import hash_of_bytes as hash_of_bytes
from perdure.codec.attachments import hashes_in as hashes_in
from perdure.codec.attachments import hashes_in_post as hashes_in_post
from perdure.codec.documents import FORMAT as FORMAT
from perdure.codec.documents import check_format as check_format
from perdure.codec.documents import from_dict as from_dict
from perdure.codec.documents import to_dict as to_dict
from perdure.codec.json_checks import MAX_DEPTH as MAX_DEPTH
from perdure.codec.json_checks import check_json as check_json
from perdure.codec.json_checks import check_text as check_text
from perdure.codec.messages import decode_message as decode_message
from perdure.codec.messages import decode_messages as decode_messages
from perdure.codec.messages import encode_message as encode_message
from perdure.codec.messages import encode_settled as encode_settled
from perdure.codec.messages import settled as settled
from perdure.codec.pieces import SpanOf as SpanOf
from perdure.codec.pieces import dump_block as dump_block
from perdure.codec.pieces import dump_pieces as dump_pieces
from perdure.codec.pieces import dump_span as dump_span
from perdure.codec.pieces import load_pieces as load_pieces
from perdure.codec.values import MAX_BYTES as MAX_BYTES
from perdure.codec.values import convert as convert
from perdure.codec.values import decode as decode
from perdure.codec.values import decode_plain as decode_plain
from perdure.codec.values import encode as encode
from perdure.codec.values import encode_if_sound as encode_if_sound
from perdure.codec.values import encode_json as encode_json
from perdure.codec.values import join as join
