// Package receipttext converts receipts to text and back. A receipt records what a request took.
package receipttext

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Receipt is a receipt's content. The text of a receipt contains the JSON of this struct.
type Receipt struct {
	Limiter string       `json:"limiter"`
	Durable bool         `json:"durable,omitempty"`
	Policy  string       `json:"policy"`
	Key     string       `json:"key"`
	Units   int64        `json:"units"`
	Parts   []model.Take `json:"parts"`
}

// Parse parses a receipt's text. Parse returns false if the text was cut off or changed. The caller must validate the
// Receipt, because anybody can write a text with a correct checksum.
func Parse(text string) (r Receipt, ok bool) {
	content, ok := Open(text)
	return r, ok && json.Unmarshal(content, &r) == nil
}

func (r Receipt) String() string {
	content, _ := json.Marshal(r) // marshaling these types cannot fail
	return Seal(content)
}

const checksumLen = 8 // length in bytes of the checksum before the JSON

// Seal returns the text of a receipt with this JSON.
func Seal(content []byte) string {
	return base64.RawURLEncoding.EncodeToString(append(checksum(content), content...))
}

// Open returns the JSON in a receipt's text. Open returns false if the text has changed since Seal wrote it.
func Open(text string) (content []byte, ok bool) {
	content, err := base64.RawURLEncoding.DecodeString(text)
	sum := content[:min(checksumLen, len(content))]
	content = content[len(sum):]
	return content, err == nil && bytes.Equal(checksum(content), sum)
}

func checksum(content []byte) []byte {
	sum := sha256.Sum256(content)
	return sum[:checksumLen]
}
